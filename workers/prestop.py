"""The preStop hook of a worker pod: `python -m rayzero.workers.prestop SECONDS`.

Asks Ray to drain this node, and waits. The controller moves the work off a draining node; once the
node is idle, Ray stops it, and so the pod. It does not call `ray.init`, which would take much of
the grace period.
"""

from __future__ import annotations

import os
import socket
import sys
import time

from ray._raylet import GcsClient  # type: ignore[attr-defined]  # draining has no public API
from ray.core.generated import autoscaler_pb2, gcs_pb2

from rayzero.engine.errors import EngineError

_RPC_TIMEOUT_S = 5.0


def request_drain(head: str, seconds: float) -> str:
    """Asks Ray to drain this node, which is found by the local address of a connection to the
    head. Returns the node's id.

    Args:
        head: as host:port.
        seconds: time until the node stops.

    Raises:
        EngineError: the node is not found, or the head rejects the request.
    """
    host, _, port = head.rpartition(":")
    address = host.strip("[]"), int(port)
    with socket.create_connection(address, timeout=_RPC_TIMEOUT_S) as connection:
        own_ip = connection.getsockname()[0]
    client = GcsClient(address=head)
    nodes = client.get_all_node_info(timeout=_RPC_TIMEOUT_S)
    own_nodes = [
        node.hex()
        for node, info in nodes.items()
        if info.node_manager_address == own_ip and info.state == gcs_pb2.GcsNodeInfo.ALIVE
    ]
    if len(own_nodes) != 1:
        raise EngineError(
            f"{len(own_nodes)} nodes of the Ray cluster at {head} have the address {own_ip}",
            "one node",
        )
    deadline_ms = int((time.time() + seconds) * 1000)
    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    accepted, reason_rejected = client.drain_node(
        own_nodes[0], reason, "the pod is being terminated", deadline_ms
    )
    if not accepted:
        raise EngineError(f"the Ray head at {head} rejected the drain request: {reason_rejected}")
    return str(own_nodes[0])


def main() -> None:
    seconds = float(sys.argv[1])
    started = time.monotonic()
    node = request_drain(os.environ["RAY_ADDRESS"], seconds)
    print(f"draining node {node}, which stops within {seconds:g} s", flush=True)
    time.sleep(max(0.0, started + seconds - time.monotonic()))


if __name__ == "__main__":
    main()

"""Tells Ray that this node is to end, and waits: `python -m rayzero.workers.prestop SECONDS`.

It is what a worker pod does before its end (preStop). The controller hears of a draining node and
moves the work to other nodes; when nothing is left on it, Ray ends the node, and so the pod. It
joins no cluster, because that alone would take a good part of the notice.
"""

from __future__ import annotations

import os
import socket
import sys
import time

from ray._raylet import GcsClient  # type: ignore[attr-defined]  # drains have no public API
from ray.core.generated import autoscaler_pb2, gcs_pb2

from rayzero.engine.errors import EngineError

_RPC_TIMEOUT_S = 5.0  # of each word with the head


def request_drain(head: str, seconds: float) -> str:
    """Asks Ray to drain this node, which is the one with the address that leads to the head.

    Args:
        head: host:port of the cluster's head.
        seconds: until the node's end.

    Returns:
        The node's id.

    Raises:
        EngineError: there is no such node, or the head does not take the notice.
    """
    host, _, port = head.rpartition(":")
    with socket.create_connection(
        (host.strip("[]"), int(port)), timeout=_RPC_TIMEOUT_S
    ) as connection:
        own = connection.getsockname()[0]
    client = GcsClient(address=head)
    nodes = client.get_all_node_info(timeout=_RPC_TIMEOUT_S)
    mine = [
        node.hex()
        for node, info in nodes.items()
        if info.node_manager_address == own and info.state == gcs_pb2.GcsNodeInfo.ALIVE
    ]
    if len(mine) != 1:
        raise EngineError(f"{len(mine)} nodes of the cluster at {head} have the address {own}")
    deadline_ms = int((time.time() + seconds) * 1000)
    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    taken, why_not = client.drain_node(mine[0], reason, "the pod is to end", deadline_ms)
    if not taken:
        raise EngineError(f"the head at {head} does not take the notice: {why_not}")
    return str(mine[0])


def main() -> None:
    seconds = float(sys.argv[1])
    begun = time.monotonic()
    node = request_drain(os.environ["RAY_ADDRESS"], seconds)
    print(f"node {node} is leaving within {seconds:g} s", flush=True)
    time.sleep(max(0.0, begun + seconds - time.monotonic()))


if __name__ == "__main__":
    main()

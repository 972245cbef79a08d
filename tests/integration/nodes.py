"""A Ray cluster of several nodes on this machine, which can be added and removed."""

from __future__ import annotations

import time

import ray
from ray._private.worker import global_worker
from ray.cluster_utils import Cluster

from rayzero.orchestrator.cluster.ray_api import draining_node_ids

PREEMPTION = 2  # DrainNodeReason: one that the node cannot reject
CPUS = 2  # per node
TIMEOUT_S = 100


class Nodes:
    """A cluster with a head without CPUs and worker nodes. This process is the driver.

    Tests share it: each must begin with `start` or `add`.
    """

    def __init__(self) -> None:
        self._node_args = {"object_store_memory": 80 * 2**20, "include_log_monitor": False}
        unused = {"include_dashboard": False, "no_monitor": True}
        head = {"num_cpus": 0, **unused, **self._node_args}
        self._cluster = Cluster(True, head_node_args=head)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")
        self._idle: list[str] = []  # of previous tests

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def start(self, count: int) -> list[str]:
        """Make the cluster have exactly this many nodes, some of which a previous test used."""
        kept, self._idle = self._idle[:count], self._idle[count:]
        self._remove_idle()
        return kept + [self.add() for _ in range(count - len(kept))]

    def add(self, cpus: int = CPUS) -> str:
        self._remove_idle()
        return str(self._cluster.add_node(num_cpus=cpus, **self._node_args).node_id)

    def kill(self, node_id: str) -> None:
        """Kill the node's raylet. Its workers exit shortly afterwards."""
        self._remove(node_id, allow_graceful=False)

    def drain(self, node_id: str) -> None:
        deadline_ms = int((time.time() + 600) * 1000)
        accepted, reason = global_worker.gcs_client.drain_node(
            node_id, PREEMPTION, "test", deadline_ms
        )
        assert accepted, reason

    def end_test(self) -> None:
        """Keep the nodes that the next test can use and remove the others."""
        self._idle = []
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        draining = draining_node_ids()
        for node_id in [node.node_id for node in self._cluster.worker_nodes]:
            is_usable = node_id in alive and node_id not in draining
            if is_usable and alive[node_id]["Resources"].get("CPU") == CPUS:
                self._idle.append(node_id)
            else:
                self._remove(node_id)
        self._wait_for_removal()

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()

    def _remove_idle(self) -> None:
        while self._idle:
            self._remove(self._idle.pop())
        self._wait_for_removal()

    def _remove(self, node_id: str, allow_graceful: bool = True) -> None:
        (node,) = [node for node in self._cluster.worker_nodes if node.node_id == node_id]
        self._cluster.remove_node(node, allow_graceful=allow_graceful)

    def _wait_for_removal(self) -> None:
        """Wait until Ray would place no worker on a removed node."""
        deadline = time.monotonic() + TIMEOUT_S
        expected = 1 + len(self._cluster.worker_nodes)
        while sum(node["Alive"] for node in ray.nodes()) > expected:
            assert time.monotonic() < deadline
            time.sleep(0.1)

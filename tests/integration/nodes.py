"""A Ray cluster of several nodes on this machine, which can be added and removed."""

from __future__ import annotations

import time

import ray
from ray._private.worker import global_worker
from ray.cluster_utils import Cluster

PREEMPTION = 2  # DrainNodeReason: one that the node cannot reject
CPUS = 2  # per node


class Nodes:
    """A cluster with a head without CPUs and worker nodes. This process is the driver."""

    def __init__(self) -> None:
        self._node_args = {"object_store_memory": 80 * 2**20}
        unused = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
        head = {"num_cpus": 0, **unused, **self._node_args}
        self._cluster = Cluster(True, head_node_args=head)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> str:
        return str(self._cluster.add_node(num_cpus=CPUS, **self._node_args).node_id)

    def kill(self, node_id: str) -> None:
        """Kill the node's raylet. Its workers exit shortly afterwards."""
        (node,) = [node for node in self._cluster.worker_nodes if node.node_id == node_id]
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, node_id: str) -> None:
        deadline_ms = int((time.time() + 600) * 1000)
        accepted, reason = global_worker.gcs_client.drain_node(
            node_id, PREEMPTION, "test", deadline_ms
        )
        assert accepted, reason

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()

"""A Ray cluster of several nodes on this machine, that come and go."""

from __future__ import annotations

import time

import ray
from ray._private.worker import global_worker
from ray.cluster_utils import Cluster

PREEMPTION = 2  # a reason to drain a node that the node cannot refuse
CPUS = 2  # of each node


class Nodes:
    """A cluster of a head without CPUs and nodes of two; the process is its driver."""

    def __init__(self) -> None:
        small = {"object_store_memory": 80 * 2**20}
        self._small = small
        head = {"num_cpus": 0, "include_dashboard": False, **small}
        self._cluster = Cluster(True, head_node_args=head)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> str:
        return str(self._cluster.add_node(num_cpus=CPUS, **self._small).node_id)

    def lose(self, node_id: str) -> None:
        """Kills its raylet and, a moment later, so die its workers."""
        (node,) = [one for one in self._cluster.worker_nodes if one.node_id == node_id]
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, node_id: str) -> None:
        until_ms = int((time.time() + 600) * 1000)
        accepted, why = global_worker.gcs_client.drain_node(node_id, PREEMPTION, "test", until_ms)
        assert accepted, why

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()

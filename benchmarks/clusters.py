"""Local Ray clusters of one node and a head that can be lost, or of several nodes that can be."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rayzero.orchestrator.cluster.ray_api import stop_error_printer
from tests.support.durable_head import DurableHead

OBJECT_STORE_BYTES = 80 * 2**20
FAST_HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Detect a lost node in seconds; Ray's defaults take a minute."""
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
NODE_IP = "127.0.0.2"
"""Of the node of a cluster with one node, beside a head without CPUs."""


@dataclass(frozen=True)
class BenchmarkCluster:
    """A cluster that this process is connected to.

    Args:
        replace_lost_nodes: call it on the main thread only, as Ray requires.
        head: the whole cluster, if it has one node: its head can be lost.
    """

    replace_lost_nodes: Callable[[], None]
    head: DurableHead | None = None


@contextmanager
def connect_to_durable_cluster(
    cpus: int, nodes: int = 1, store: str = "rocksdb", has_controller_node: bool = False
) -> Iterator[DurableHead]:
    """Start a cluster whose head can be lost, with this process as its driver, on the first node.
    Arguments as of `DurableHead`."""
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")  # of this process
    _set_environment()
    with (
        tempfile.TemporaryDirectory(prefix="cluster-") as folder,
        closing(DurableHead(Path(folder), cpus, nodes, store, has_controller_node)) as head,
    ):
        ray.init(address=head.address, _node_ip_address=NODE_IP, **QUIET)
        stop_error_printer()
        try:
            yield head
        finally:
            ray.shutdown()


def _set_environment() -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # the cluster is local
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def _is_slow_start(error: Exception) -> bool:
    return "timed out during startup" in str(error)


@contextmanager
def connect_to_cluster(
    nodes: int, cpus: int, has_controller_node: bool = False
) -> Iterator[BenchmarkCluster]:
    """Start a cluster with this process as its driver.

    Args:
        nodes: worker nodes.
        cpus: per node. The head has none.
        has_controller_node: as of `DurableHead`, with one node.
    """
    if nodes == 1:
        with connect_to_durable_cluster(cpus, has_controller_node=has_controller_node) as head:
            yield BenchmarkCluster(lambda: None, head)
        return
    _set_environment()
    # Deferred: a testing utility with additional dependencies.
    from ray.cluster_utils import Cluster

    os.environ.update(FAST_HEALTH_CHECKS)
    node_args: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(True, head_node_args={"num_cpus": 0, **node_args})

    def replace_lost_nodes() -> None:
        infos: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        alive = sum(node["Alive"] and "CPU" in node["Resources"] for node in infos)
        for _ in range(nodes - alive):
            try:
                cluster.add_node(num_cpus=cpus, **node_args)
            except Exception as error:
                if not _is_slow_start(error):
                    raise
                return  # it may still come: counted again at the next call

    try:
        ray.init(address=cluster.address, **QUIET)
        stop_error_printer()
        replace_lost_nodes()
        yield BenchmarkCluster(replace_lost_nodes)
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]

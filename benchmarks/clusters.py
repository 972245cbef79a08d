"""Local Ray clusters of one node, or of several nodes that can be lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from rayzero.orchestrator.cluster.ray_api import stop_error_printer

OBJECT_STORE_BYTES = 80 * 2**20
FAST_HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Detect a lost node in seconds; Ray's defaults take a minute."""
START_ATTEMPTS = 4


def _start_local_cluster(**options: Any) -> None:
    """Ray gives its own processes 30 s to start, which they may miss on a busy machine."""
    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(address="local", include_dashboard=False, **options)
            return
        except Exception as error:
            ray.shutdown()
            if not _is_slow_start(error) or attempt == START_ATTEMPTS - 1:
                raise


def _is_slow_start(error: Exception) -> bool:
    return "timed out during startup" in str(error)


@contextmanager
def connect_to_cluster(nodes: int, cpus: int) -> Iterator[Callable[[], None]]:
    """Start a cluster with this process as its driver.

    Args:
        nodes: worker nodes; if there are several, the head has no CPUs.
        cpus: per node.

    Yields:
        a function that replaces lost nodes. Call it on the main thread only, as Ray requires.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # the cluster is local
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if nodes == 1:
        _start_local_cluster(num_cpus=cpus, **quiet)
        stop_error_printer()
        try:
            yield lambda: None
        finally:
            ray.shutdown()
        return
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
        ray.init(address=cluster.address, **quiet)
        stop_error_printer()
        replace_lost_nodes()
        yield replace_lost_nodes
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]

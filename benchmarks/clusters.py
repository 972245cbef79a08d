"""Ray clusters on this machine: of one node, or of several of which each may be lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

OBJECT_STORE_BYTES = 80 * 2**20
FAST = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""So that a lost node is known in seconds, where Ray's own settings take a minute."""


@contextmanager
def connected(nodes: int, cpus: int) -> Iterator[Callable[[], None]]:
    """A cluster of so many nodes with so many CPUs each; this process is its driver.

    Several nodes lie beside a head without CPUs.

    Yields:
        what adds a node for each that was lost. For the main thread only: Ray wants it so.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # nobody else can reach it
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if nodes == 1:
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
        try:
            yield lambda: None
        finally:
            ray.shutdown()
        return
    # Here, because it is for tests, and needs what a plain run does not.
    from ray.cluster_utils import Cluster

    os.environ.update(FAST)
    small: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(True, head_node_args={"num_cpus": 0, **small})

    def refill() -> None:
        seen: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        living = sum(one["Alive"] and "CPU" in one["Resources"] for one in seen)
        for _ in range(nodes - living):
            cluster.add_node(num_cpus=cpus, **small)

    try:
        ray.init(address=cluster.address, **quiet)
        refill()
        yield refill
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]

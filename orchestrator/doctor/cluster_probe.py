"""Probe of a Ray cluster: `python -m rayzero.orchestrator.doctor.cluster_probe ADDRESS`."""

from __future__ import annotations

import json
import sys
from typing import Any

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.cluster.connect import connect
from rayzero.orchestrator.cluster.ray_api import draining_node_ids, node_snapshot


def describe_cluster(address: str) -> dict[str, Any]:
    """Number of nodes, total and free resources.

    Raises:
        ConfigError: there is no cluster at that address, or it rejects the connection.
    """
    cluster = connect(address)
    try:
        nodes = node_snapshot()
        capacities = nodes.all_capacities
        return {
            "nodes": len(capacities),
            "cpus": sum(node.cpus for node in capacities),
            "gpus": sum(node.gpus for node in capacities),
            "free_cpus": nodes.total_free.cpus,
            "free_gpus": nodes.total_free.gpus,
            "leaving": len(draining_node_ids()),
        }
    finally:
        cluster.close()


def cluster_main() -> None:
    try:
        facts = describe_cluster(sys.argv[1])
    except RayzeroError as error:
        facts = {"trouble": error.seen}
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    cluster_main()

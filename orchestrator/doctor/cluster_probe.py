"""What a Ray cluster has, asked as a process of its own:
`python -m rayzero.orchestrator.doctor.cluster_probe ADDRESS`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.cluster.connect import connect
from rayzero.orchestrator.cluster.ray_api import draining_node_ids, node_snapshot


def describe_cluster(address: str) -> dict[str, Any]:
    """Nodes, and what they have in all and free.

    Raises:
        ConfigError: there is no cluster at that address, or it will not have us.
    """
    cluster = connect(address)
    try:
        nodes = node_snapshot()
        whole = nodes.all_capacities
        return {
            "nodes": len(whole),
            "cpus": sum(one.cpus for one in whole),
            "gpus": sum(one.gpus for one in whole),
            "free_cpus": nodes.total_free.cpus,
            "free_gpus": nodes.total_free.gpus,
            "leaving": len(draining_node_ids()),
        }
    finally:
        cluster.close()


def cluster_main() -> None:
    try:
        told = describe_cluster(sys.argv[1])
    except RayzeroError as error:
        told = {"trouble": error.seen}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    cluster_main()

"""What a Ray cluster has, asked as a process of its own:
`python -m rayzero.orchestrator.doctor.cluster ADDRESS`."""

from __future__ import annotations

import json
import sys
from typing import Any

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.cluster import connect
from rayzero.orchestrator.nodes import draining, look


def ask(address: str) -> dict[str, Any]:
    """Nodes, and what they have in all and free.

    Raises:
        ConfigError: there is no cluster at that address, or it will not have us.
    """
    cluster = connect(address)
    try:
        nodes = look()
        whole = nodes.capacities
        return {
            "nodes": len(whole),
            "cpus": sum(one.cpus for one in whole),
            "gpus": sum(one.gpus for one in whole),
            "free_cpus": nodes.all_free.cpus,
            "free_gpus": nodes.all_free.gpus,
            "leaving": len(draining()),
        }
    finally:
        cluster.close()


def main() -> None:
    try:
        told = ask(sys.argv[1])
    except RayzeroError as error:
        told = {"trouble": error.seen}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()

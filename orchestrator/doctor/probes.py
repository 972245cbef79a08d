"""Probes that run in processes of their own: `python -m rayzero.orchestrator.doctor.probes NAME`.

`cluster` takes an address as an argument, `storage` a path or URL on stdin: a URL may contain
credentials, and every user of a machine can read command lines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

from rayzero.engine.errors import RayzeroError

_TEST_BYTES = 4 * 2**20


def check_cluster(address: str) -> dict[str, Any]:
    """Number of nodes, total and free resources. Raises ConfigError if there is no cluster at that
    address, or it rejects the connection."""
    from rayzero.orchestrator.cluster.connect import connect
    from rayzero.orchestrator.cluster.ray_api import draining_node_ids, node_snapshot

    with closing(connect(address)):
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


def check_storage(place: str) -> dict[str, Any]:
    """Writes, reads and removes a file through the store that checkpoints use; if the folder does
    not exist yet, in its nearest existing parent. Returns the seconds of a durable write, its
    bytes, and for a folder the free bytes. Raises RayzeroError if the folder or URL cannot be
    used."""
    from rayzero.engine.checkpoint.store import is_remote, open_store

    top, remote = place, is_remote(place)
    if not remote:
        folder = Path(place.removeprefix("file://")).absolute()
        top = str(next(path for path in (folder, *folder.parents) if path.exists()))
    store = open_store(top)
    name, content = f".rayzero-doctor-{uuid4().hex}", os.urandom(_TEST_BYTES)
    started = time.monotonic()
    try:
        store.create(name, [memoryview(content)])
        write_s = time.monotonic() - started
        if store.read(name) != content:
            raise RayzeroError(f"{top}: the data read differs from the data written")
    finally:
        store.remove(name)
    facts: dict[str, Any] = {"write_s": write_s, "nbytes": _TEST_BYTES}
    if not remote:
        stat = os.statvfs(top)
        facts["free_bytes"] = stat.f_bavail * stat.f_frsize
    return facts


def main() -> None:
    try:
        if sys.argv[1] == "cluster":
            facts = check_cluster(sys.argv[2])
        else:
            facts = check_storage(sys.stdin.read())
    except RayzeroError as error:
        facts = {"trouble": error.seen, "fix": error.fix}
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()

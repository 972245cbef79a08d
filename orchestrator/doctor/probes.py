"""Probes that run in processes of their own: `python -m rayzero.orchestrator.doctor.probes NAME`.

`cluster` takes an address as an argument, `storage` a path or URL on stdin: a URL may contain
credentials, and every user of a machine can read command lines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

from rayzero.engine.errors import RayzeroError, first_line
from rayzero.orchestrator.cluster.addresses import RECONNECT_VARIABLE

_TEST_BYTES = 4 * 2**20
_NODE_LIMIT_S = 15.0
_NODES_LIMIT_S = 30.0  # less than that of the probe of the whole cluster
_ANSWER_S = 10.0  # of nodes, which may have to start a process first
_MAX_NODES = 64  # that are asked
_STORES = ("RAY_REDIS_ADDRESS", "RAY_gcs_storage_path")
RAY_RECONNECT_S = 60.0
"""Ray's default for the time that nodes wait for a lost head."""


def check_cluster(address: str) -> dict[str, Any]:
    """Number of nodes, total and free resources, and in `health` what each node has measured, or
    why it has not. Raises ConfigError if there is no cluster at that
    address, or it rejects the connection."""
    from rayzero.orchestrator.cluster.connect import connect
    from rayzero.orchestrator.cluster.ray_api import draining_node_ids, node_snapshot
    from rayzero.workers.lifetimes import find_owned, has_process

    with closing(connect(address)):
        left = Counter(owned.job for owned in find_owned())
        nodes = node_snapshot()
        capacities = nodes.all_capacities
        return {
            "nodes": len(capacities),
            "cpus": sum(node.cpus for node in capacities),
            "gpus": sum(node.gpus for node in capacities),
            "free_cpus": nodes.total_free.cpus,
            "free_gpus": nodes.total_free.gpus,
            "leaving": len(draining_node_ids()),
            "health": _check_nodes(),
            "left": {job: left[job] for job in sorted(left) if not has_process(job)},
            "reconnect_s": reconnect_limits(),
        }


def _check_node() -> dict[str, Any]:
    """The facts of the node's probe, in a task there, and the time of its clock."""
    from rayzero.workers.probe_process import run_probe
    from rayzero.workers.vault.health import NODE_PROBE

    result = run_probe(NODE_PROBE, (), _NODE_LIMIT_S)
    return {**result.facts, "trouble": result.error, "unix_s": time.time()}


def _check_nodes() -> dict[str, Any]:
    """Returns the facts of each node's probe, with `clock`; or why there are none."""
    from rayzero.orchestrator.cluster.ray_api import ask_nodes, node_capacities, node_names
    from rayzero.workers.vault.health import clock_offset_s

    asked_s = time.time()
    names = node_names()
    results = ask_nodes(_check_node, node_capacities(), _NODES_LIMIT_S)
    received_s = time.time()
    for facts in results.values():
        if isinstance(facts, dict):
            facts["clock"] = clock_offset_s(facts.pop("unix_s"), asked_s, received_s)
    return {
        f"{names[node]} ({node[:8]})": it if isinstance(it, dict) else {"trouble": first_line(it)}
        for node, it in results.items()
    }


def reconnect_limits() -> dict[str, float]:
    """The time that the nodes of the connected cluster wait for a lost head, by id, if the head has
    a store from which it can come back. Nodes that do not answer in time are left out."""
    from rayzero.orchestrator.cluster.ray_api import ask_nodes, head_node_id, node_capacities

    nodes = list(node_capacities())[:_MAX_NODES]
    head = head_node_id()
    answers = ask_nodes(read_settings, [] if head is None else [head], _ANSWER_S)
    settings = [found for found in answers.values() if isinstance(found, dict)]
    if not any(name in found for found in settings for name in _STORES):
        return {}
    answers = ask_nodes(read_settings, set(nodes) - {head}, _ANSWER_S)
    found = {node: it for node, it in answers.items() if isinstance(it, dict)}
    return {
        node: float(it.get(RECONNECT_VARIABLE) or RAY_RECONNECT_S) for node, it in found.items()
    }


def read_settings() -> dict[str, str]:
    """Returns those of Ray's settings in this process's environment that are about lost heads."""
    return {name: os.environ[name] for name in (*_STORES, RECONNECT_VARIABLE) if name in os.environ}


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

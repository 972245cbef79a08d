"""Probes that run in processes of their own: `python -m rayzero.orchestrator.doctor.probes NAME`.

`cluster` takes an address as an argument. `storage` takes a path or URL on stdin, because a URL may
contain credentials, and every user of a machine can read command lines.
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
_NODES_LIMIT_S = 30.0  # below the limit for the probe of the whole cluster
_ANSWER_S = 10.0  # limit for a node's answer; Ray may have to start a process there first
_MAX_NODES = 64  # how many nodes are asked for their settings
_STORES = ("RAY_REDIS_ADDRESS", "RAY_gcs_storage_path")
RAY_RECONNECT_S = 60.0
"""Ray's default for the time that nodes wait for a lost head."""


def check_cluster(address: str) -> dict[str, Any]:
    """Returns the number of nodes, total and free resources, and, in `health`, the measurements of
    each node, or why there are none. Raises ConfigError if there is no cluster at that address, or
    it rejects the connection."""
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
    """Runs the probe of a node. Returns its facts, and the time of the node's clock. Runs in a task
    on the node."""
    from rayzero.workers.probe_process import run_probe
    from rayzero.workers.vault.health import NODE_PROBE

    result = run_probe(NODE_PROBE, (), _NODE_LIMIT_S)
    return {**result.facts, "trouble": result.error, "unix_s": time.time()}


def _check_nodes() -> dict[str, Any]:
    """Returns the facts of each node's probe, with `clock`; or a text in `trouble`, why there are
    none."""
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
        f"{names[node]} ({node[:8]})": (
            facts if isinstance(facts, dict) else {"trouble": first_line(facts)}
        )
        for node, facts in results.items()
    }


def reconnect_limits() -> dict[str, float]:
    """Returns how long the nodes of the connected cluster wait for a lost head, by node id. Empty
    if the head has no store from which it can come back. Leaves out nodes that do not answer."""
    from rayzero.orchestrator.cluster.ray_api import ask_nodes, head_node_id, node_capacities

    nodes = list(node_capacities())[:_MAX_NODES]
    head = head_node_id()
    answers = ask_nodes(read_settings, [] if head is None else [head], _ANSWER_S)
    head_settings = [settings for settings in answers.values() if isinstance(settings, dict)]
    if not any(name in settings for settings in head_settings for name in _STORES):
        return {}
    answers = ask_nodes(read_settings, set(nodes) - {head}, _ANSWER_S)
    return {
        node: float(settings.get(RECONNECT_VARIABLE) or RAY_RECONNECT_S)
        for node, settings in answers.items()
        if isinstance(settings, dict)
    }


def read_settings() -> dict[str, str]:
    """Returns Ray's settings about lost heads in this process's environment."""
    return {name: os.environ[name] for name in (*_STORES, RECONNECT_VARIABLE) if name in os.environ}


def check_storage(place: str) -> dict[str, Any]:
    """Writes, reads and removes a file through the store that checkpoints use. If the folder does
    not exist yet, uses its nearest existing parent. Returns the seconds of a durable write, its
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

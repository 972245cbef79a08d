"""Detects what a job leaked: in its cluster, and on this machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.token_head import TokenHead, wait_for

TIMEOUT_S = 30.0
_JOB_ACTORS = ("ray::JobActor", "ray::WorkerActor", "ray::VaultActor")
_SHARED_MEMORY_PREFIXES = ("rayzero", "torch_", "gloo")
# Left by Ray's dashboard, which is killed, and by torch's compile cache.
_IGNORED_PREFIXES = ("pymp-", "torchinductor_")


def find_cluster_leaks(head: TokenHead) -> list[str]:
    """Live actors, placement groups and processes of jobs, after a grace period for exits."""
    with suppress(TimeoutError):
        wait_for(lambda: not _list_leaks(head), TIMEOUT_S, "no leaks")
    return _list_leaks(head)


def list_shared_memory() -> set[str]:
    """Names of shared-memory files of the kinds that training creates."""
    names = (path.name for path in Path("/dev/shm").iterdir())
    return {name for name in names if name.startswith(_SHARED_MEMORY_PREFIXES)}


def find_temporary_files(temporary: Path) -> set[str]:
    """Files in the temporary folder that rayzero or its dependencies leaked."""
    names = (path.name for path in temporary.iterdir())
    return {name for name in names if not name.startswith(_IGNORED_PREFIXES)}


def _list_leaks(head: TokenHead) -> list[str]:
    leaks = [
        f"{kind[:-1]} {entry.get('name') or entry.get('class_name')}"
        for kind, final_state in (("actors", "DEAD"), ("placement_groups", "REMOVED"))
        for entry in _query_state(head, kind)
        if entry["state"] != final_state
        and entry.get("class_name") != "CommandServerActor"  # lives as long as its cluster
    ]
    for process in head.processes():
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if command.startswith(_JOB_ACTORS) or "-m rayzero" in command:
                leaks.append(command)
    return leaks


def _query_state(head: TokenHead, kind: str) -> list[dict[str, str]]:
    response = head.get_json(f"/api/v0/{kind}?limit=1000")
    if response is None:
        return [{"name": f"{kind} are not available", "state": ""}]
    rows: list[dict[str, str]] = response["data"]["result"]["result"]
    return rows

"""What a job left behind: in the cluster it ran in, and on this machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.token_head import TokenHead, wait_for

LIMIT_S = 30.0
_OURS = ("ray::JobActor", "ray::WorkerActor", "ray::VaultActor")
_SHARED = ("rayzero", "torch_", "gloo")
# Of Ray's dashboard, which is killed, and torch's cache for those who compile.
_OTHERS = ("pymp-", "torchinductor_")


def remains(head: TokenHead) -> list[str]:
    """Living actors, placement groups and processes of jobs; waits for those that are on their way
    out."""
    with suppress(TimeoutError):
        wait_for(lambda: not _now(head), LIMIT_S, "nothing left")
    return _now(head)


def shared_memory() -> set[str]:
    """Named shared memory of a kind that training might make."""
    return {one.name for one in Path("/dev/shm").iterdir() if one.name.startswith(_SHARED)}


def files_left(temporary: Path) -> set[str]:
    """What is in the folder for temporary files of all that ran, and was put there by us."""
    return {one.name for one in temporary.iterdir() if not one.name.startswith(_OTHERS)}


def _now(head: TokenHead) -> list[str]:
    found = [
        f"{kind[:-1]} {one.get('name') or one.get('class_name')}"
        for kind, over in (("actors", "DEAD"), ("placement_groups", "REMOVED"))
        for one in _listed(head, kind)
        if one["state"] != over
    ]
    for process in head.family():
        with suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if title.startswith(_OURS) or "-m rayzero" in title:
                found.append(title)
    return found


def _listed(head: TokenHead, kind: str) -> list[dict[str, str]]:
    answer = head.asked(f"/api/v0/{kind}?limit=1000")
    if answer is None:
        return [{"name": f"{kind} are not told", "state": ""}]
    rows: list[dict[str, str]] = answer["data"]["result"]["result"]
    return rows

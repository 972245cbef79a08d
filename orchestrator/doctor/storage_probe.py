"""Probe that writes, reads and removes a file through the store that checkpoints use:
`python -m rayzero.orchestrator.doctor.storage_probe`, with the path or URL on stdin: a URL may
contain credentials, and every user of a machine can read command lines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from rayzero.engine.checkpoint.open_store import open_store
from rayzero.engine.checkpoint.store import is_remote
from rayzero.engine.errors import RayzeroError

_TEST_BYTES = 4 * 2**20


def check_storage(place: str) -> dict[str, Any]:
    """Seconds of a durable write, its bytes, and for a folder the free bytes.

    If the folder does not exist yet, its nearest existing parent is probed.

    Raises:
        RayzeroError: the folder or URL cannot be used.
    """
    remote = is_remote(place)
    top = place if remote else str(_existing_ancestor(Path(place.removeprefix("file://"))))
    store = open_store(top)
    name, content = f".rayzero-doctor-{uuid4().hex}", os.urandom(_TEST_BYTES)
    started = time.monotonic()
    try:
        with store.create(name) as sink:
            sink.write(memoryview(content))
        taken = time.monotonic() - started
        if store.read(name) != content:
            raise RayzeroError(f"{top}: the data read differs from the data written")
    finally:
        store.remove(name)
    facts: dict[str, Any] = {"write_s": taken, "nbytes": _TEST_BYTES}
    if not remote:
        stat = os.statvfs(top)
        facts["free_bytes"] = stat.f_bavail * stat.f_frsize
    return facts


def _existing_ancestor(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def storage_main() -> None:
    try:
        facts = check_storage(sys.stdin.read())
    except RayzeroError as error:
        facts = {"trouble": error.seen, "fix": error.fix}
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    storage_main()

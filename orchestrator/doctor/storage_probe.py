"""Whether checkpoints can be written, read and removed at a place, as a process of its own:
`python -m rayzero.orchestrator.doctor.storage_probe`, with the path or URL on its standard input, because
everybody on a machine may read command lines, and a URL may hold credentials.

It goes through the same store as checkpoints do, so what it finds is what they will find.
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
    """Seconds of a durable write, bytes, and for a folder the free bytes.

    A folder that is not there yet is looked for upwards: what is above it must be writable.

    Raises:
        RayzeroError: the place cannot be used.
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
            raise RayzeroError(f"{top}: what is read is not what was written")
    finally:
        store.remove(name)
    told: dict[str, Any] = {"write_s": taken, "nbytes": _TEST_BYTES}
    if not remote:
        found = os.statvfs(top)
        told["free_bytes"] = found.f_bavail * found.f_frsize
    return told


def _existing_ancestor(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def storage_main() -> None:
    try:
        told = check_storage(sys.stdin.read())
    except RayzeroError as error:
        told = {"trouble": error.seen, "fix": error.fix}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    storage_main()

"""Everything that a cluster and its jobs publish or store, to be searched for secrets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import psutil

from benchmarks.token_head import TokenHead

STATE = ("actors", "jobs", "tasks", "workers", "placement_groups", "nodes", "runtime_envs")
KV = """
import json, sys, ray
from ray.experimental import internal_kv as kv
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
for space in (None, b"", b"job", b"session", b"fun", b"cluster", b"named_actors", b"rayzero"):
    for key in kv._internal_kv_list(b"", namespace=space):
        value = kv._internal_kv_get(key, namespace=space) or b""
        print(json.dumps([repr(key), repr(value)]))
"""


def command_lines() -> Iterator[tuple[str, bytes]]:
    """Of every process on this machine that this process may inspect."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            yield f"process {process.pid}", "\0".join(process.cmdline()).encode()


def files(*folders: Path) -> Iterator[tuple[str, bytes]]:
    for folder in folders:
        for path in folder.rglob("*"):
            with suppress(OSError):
                if path.is_file():
                    yield str(path), path.read_bytes()


def served(url: str) -> Iterator[tuple[str, bytes]]:
    """The pages of a job's metrics endpoint."""
    for path in ("/", "/metrics", "/snapshot.json", "/nothing"):
        with suppress(OSError), urlopen(url + path, timeout=60) as response:
            yield path, response.read()


def by_ray(head: TokenHead) -> Iterator[tuple[str, bytes]]:
    """The dashboard's answers, and the contents of the cluster's key-value store."""
    for path in ["/api/jobs/", *(f"/api/v0/{kind}?detail=1&limit=1000" for kind in STATE)]:
        yield path, json.dumps(head.asked(path)).encode()
    command = [sys.executable, "-c", KV, head.address]
    done = subprocess.run(command, env=head.env, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    yield "the cluster's keys and values", done.stdout

"""Everything that a cluster and its jobs expose or write, to be searched for secrets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import psutil

from tests.support.token_head import TokenHead

STATE_KINDS = ("actors", "jobs", "tasks", "workers", "placement_groups", "nodes", "runtime_envs")
DUMP_KV = """
import json, sys, ray
from ray.experimental import internal_kv as kv
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
for namespace in (None, b"", b"job", b"session", b"fun", b"cluster", b"named_actors", b"rayzero"):
    for key in kv._internal_kv_list(b"", namespace=namespace):
        value = kv._internal_kv_get(key, namespace=namespace) or b""
        print(json.dumps([repr(key), repr(value)]))
"""


def read_command_lines() -> Iterator[tuple[str, bytes]]:
    """Command lines of all processes that this one can inspect."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            yield f"process {process.pid}", "\0".join(process.cmdline()).encode()


def read_files(*folders: Path) -> Iterator[tuple[str, bytes]]:
    for folder in folders:
        for path in folder.rglob("*"):
            with suppress(OSError):
                if path.is_file():
                    yield str(path), path.read_bytes()


def read_metrics_server(url: str) -> Iterator[tuple[str, bytes]]:
    """Responses of a job's metrics server."""
    for path in ("/", "/metrics", "/snapshot.json", "/history.json", "/steps.csv", "/nothing"):
        with suppress(OSError), urlopen(url + path, timeout=60) as answer:
            yield path, answer.read()


def read_ray_state(head: TokenHead) -> Iterator[tuple[str, bytes]]:
    """Responses of the Ray dashboard and the contents of the GCS key-value store."""
    for path in ["/api/jobs/", *(f"/api/v0/{kind}?detail=1&limit=1000" for kind in STATE_KINDS)]:
        yield path, json.dumps(head.get_json(path)).encode()
    command = [sys.executable, "-c", DUMP_KV, head.address]
    done = subprocess.run(command, env=head.env, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    yield "GCS key-value store", done.stdout

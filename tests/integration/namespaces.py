"""Runs a module as the first process of namespaces of its own: all it starts ends with it, and what
it does to the network and to mounts, nobody else sees."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--net", "--mount-proc")
# A first process that takes note of the ends of orphans: Ray's workers end with their raylet, and
# take one that nobody took note of for alive.
_FIRST = ("sh", "-c", '"$@"; exit $?', "sh")
_LIMIT_S = 500


@functools.cache
def why_not() -> str:
    """Why this machine has no such namespaces; empty when it has."""
    try:
        done = subprocess.run([*_UNSHARE, "ip", "link"], capture_output=True, text=True, timeout=20)
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip()


def alone(module: str, scenario: str) -> dict[str, Any]:
    """The JSON object that the scenario printed. Skips the test where that cannot be."""
    if why_not():
        pytest.skip(f"needs namespaces of its own: {why_not()}")
    done = subprocess.run(
        [*_UNSHARE, *_FIRST, sys.executable, "-m", module, scenario],
        cwd=ROOT,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    found: dict[str, Any] = json.loads(line)
    return found


def prepare() -> Path:
    """In the module: a loopback interface, shared memory, and a folder with a short name (Ray puts
    sockets there) that all go with the namespaces."""
    command("ip", "link", "set", "lo", "up")
    command("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    command("mount", "-t", "tmpfs", "tmpfs", "/run")
    folder = Path("/run/rz")
    folder.mkdir()
    return folder


def command(*words: str) -> None:
    subprocess.run(words, check=True, timeout=20, stdout=subprocess.DEVNULL)

"""Runs a module in new PID, mount and network namespaces.

All of its processes are killed with it, and its network and mount changes are isolated.
"""

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
# PID 1 must reap orphans: Ray's workers exit with their raylet, and consider a zombie alive.
_INIT = ("sh", "-c", '"$@"; exit $?', "sh")
_TIMEOUT_S = 500


@functools.cache
def unsupported_reason() -> str:
    """Why this machine cannot create namespaces; empty if it can."""
    try:
        done = subprocess.run([*_UNSHARE, "ip", "link"], capture_output=True, text=True, timeout=20)
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip()


def run_in_namespaces(module: str) -> dict[str, Any]:
    """Run a module and return the JSON object that it printed.

    Skips the test if the machine does not support namespaces.
    """
    if unsupported_reason():
        pytest.skip(f"cannot create namespaces: {unsupported_reason()}")
    done = subprocess.run(
        [*_UNSHARE, *_INIT, sys.executable, "-m", module],
        cwd=ROOT,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    result: dict[str, Any] = json.loads(line)
    return result


def set_up_namespaces() -> Path:
    """Set up loopback and shared memory inside the namespaces, and return a new folder.

    The folder has a short path, because Ray puts sockets into it.
    """
    run_command("ip", "link", "set", "lo", "up")
    run_command("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    run_command("mount", "-t", "tmpfs", "tmpfs", "/run")
    folder = Path("/run/rz")
    folder.mkdir()
    return folder


def run_command(*words: str) -> None:
    subprocess.run(words, check=True, timeout=20, stdout=subprocess.DEVNULL)

"""Asks this machine, its torch, the cluster and the store. What is broken is told, never raised."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

from rayzero.engine.masking import masked
from rayzero.orchestrator.doctor.facts import Facts, Machine, Probe

_TORCH_S = 90.0  # importing torch on a busy machine, and 30 s for a collective
_CLUSTER_S = 45.0
_STORAGE_S = 45.0
_KILLED_S = 5.0
_WORDS = 300  # of a failed process's last line


def gather(place: str, address: str) -> Facts:
    """All facts; takes as long as the slowest of the probes, which run side by side.

    Args:
        place: folder or URL for checkpoints.
        address: of a Ray cluster; empty for none.
    """
    with TemporaryDirectory(prefix="rayzero-doctor-") as folder, ThreadPoolExecutor(4) as threads:
        torch, _ = (
            threads.submit(ask, "rayzero.engine.probe", (str(rank), folder), _TORCH_S)
            for rank in range(2)
        )
        store = threads.submit(ask, "rayzero.orchestrator.doctor.storage", (), _STORAGE_S, place)
        cluster = (
            threads.submit(ask, "rayzero.orchestrator.doctor.cluster", (address,), _CLUSTER_S)
            if address
            else None
        )
        return Facts(
            machine=this_machine(os.environ),
            torch=torch.result(),
            cluster=None if cluster is None else cluster.result(),
            storage=store.result(),
            address=address,
            place=masked(place),
        )


def ask(module: str, arguments: tuple[str, ...], limit_s: float, told_it: str = "") -> Probe:
    """Runs a module that prints JSON objects, one a line; what it said last of a key counts.

    A line with `trouble` says why the process has no more to tell. One that is not over in time is
    killed, and its answers so far count.

    Args:
        told_it: what it finds on its standard input.
    """
    command = [sys.executable, "-m", module, *arguments]
    # Files, not pipes: what the process started may hold a pipe open for longer than it lives.
    with TemporaryFile() as said, TemporaryFile() as complaint:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=complaint)
        try:
            process.communicate(told_it.encode(), timeout=limit_s)
            trouble = ""
            if process.returncode != 0:
                trouble = _ending(process.returncode, _text(complaint))
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # it may hang in a disk that does not answer
                process.wait(_KILLED_S)
            trouble = f"no answer within {limit_s:g} s"
        told = _told(_text(said))
    return Probe(told, str(told.pop("trouble", trouble)))


def this_machine(environment: Mapping[str, str]) -> Machine:
    """What this process can see by itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    token = Path.home() / ".ray" / "auth_token"
    named = environment.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    return Machine(
        python=sys.version_info[:3],
        ray=_version("ray"),
        shm_bytes=_size(Path("/dev/shm")),
        memfd_trouble=_memfd_trouble(),
        open_files=(soft, hard if hard != resource.RLIM_INFINITY else sys.maxsize),
        stray_token=not named and token.exists(),
    )


def _told(text: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("{"):  # libraries print to stdout, too
            with suppress(ValueError):  # it was killed in the middle of it
                told |= json.loads(line)
    return told


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _ending(code: int, complaint: str) -> str:
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return lines[-1][:_WORDS] if lines else f"the process that asked ended with {how}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _size(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _memfd_trouble() -> str:
    try:
        os.close(os.memfd_create("rayzero-doctor"))
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    return ""

"""Collects facts about this machine, torch, the cluster and the checkpoint store.

Problems are returned as facts, never raised.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

from rayzero.engine.redact import redact_url


class Severity(StrEnum):
    """No problem; jobs may be slow or fail; jobs cannot run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Args:
        seen: the observation, with numbers.
        fix: what to change, if there is a problem.
    """

    name: str
    level: Severity
    seen: str
    fix: str = ""


@dataclass(frozen=True)
class ProbeResult:
    """The output of a probe.

    Args:
        facts: printed facts, also of a probe that failed later.
        error: why it did not complete; empty if it did.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class MachineFacts:
    """Facts that need no subprocess.

    Args:
        python: version of this interpreter, as (3, 11, 7).
        ray: its version; empty if it is not installed.
        shm_bytes: size of /dev/shm; None if there is none.
        memfd_error: why memfd_create fails; empty if it works.
        open_files: soft and hard limit.
        stray_token: whether a token in the home folder enables authentication without a setting.
    """

    python: tuple[int, int, int]
    ray: str
    shm_bytes: int | None
    memfd_error: str
    open_files: tuple[int, int]
    stray_token: bool


@dataclass(frozen=True)
class SystemFacts:
    """All facts.

    Args:
        torch: from the first of two processes.
        cluster: None without an address.
        storage: of `checkpoint_path`.
    """

    machine: MachineFacts
    torch: ProbeResult
    cluster: ProbeResult | None
    storage: ProbeResult
    address: str
    checkpoint_path: str


_TORCH_TIMEOUT_S = 90.0  # importing torch on a busy machine, and 30 s for a collective


_CLUSTER_TIMEOUT_S = 45.0


_STORAGE_TIMEOUT_S = 45.0


_KILL_TIMEOUT_S = 5.0


_MAX_ERROR_CHARS = 300  # of a failed process's last line


def collect_facts(place: str, address: str) -> SystemFacts:
    """Runs all probes in parallel.

    Args:
        place: folder or URL for checkpoints.
        address: Ray cluster; empty for none.
    """
    with TemporaryDirectory(prefix="rayzero-doctor-") as folder, ThreadPoolExecutor(4) as threads:
        torch, _ = (
            threads.submit(
                run_probe, "rayzero.engine.torch_probe", (str(rank), folder), _TORCH_TIMEOUT_S
            )
            for rank in range(2)
        )
        store = threads.submit(
            run_probe, "rayzero.orchestrator.doctor.storage_probe", (), _STORAGE_TIMEOUT_S, place
        )
        cluster = (
            threads.submit(
                run_probe,
                "rayzero.orchestrator.doctor.cluster_probe",
                (address,),
                _CLUSTER_TIMEOUT_S,
            )
            if address
            else None
        )
        return SystemFacts(
            machine=inspect_machine(os.environ),
            torch=torch.result(),
            cluster=None if cluster is None else cluster.result(),
            storage=store.result(),
            address=address,
            checkpoint_path=redact_url(place),
        )


def run_probe(
    module: str, arguments: tuple[str, ...], limit_s: float, stdin_text: str = ""
) -> ProbeResult:
    """Runs a module that prints JSON objects, one a line; later values of a key win.

    The key `trouble` is the error of the probe. A process that exceeds the limit is killed, and its
    output so far is used.

    Args:
        stdin_text: passed on its stdin.
    """
    command = [sys.executable, "-m", module, *arguments]
    # Files, not pipes: a child of the process may keep a pipe open after it has ended.
    with TemporaryFile() as said, TemporaryFile() as complaint:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=complaint)
        try:
            process.communicate(stdin_text.encode(), timeout=limit_s)
            trouble = ""
            if process.returncode != 0:
                trouble = _exit_reason(process.returncode, _read_text(complaint))
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # it may hang in I/O
                process.wait(_KILL_TIMEOUT_S)
            trouble = f"no answer within {limit_s:g} s"
        told = _parse_output(_read_text(said))
    return ProbeResult(told, str(told.pop("trouble", trouble)))


def inspect_machine(environment: Mapping[str, str]) -> MachineFacts:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    token = Path.home() / ".ray" / "auth_token"
    named = environment.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    return MachineFacts(
        python=sys.version_info[:3],
        ray=_package_version("ray"),
        shm_bytes=_filesystem_bytes(Path("/dev/shm")),
        memfd_error=_memfd_error(),
        open_files=(soft, hard if hard != resource.RLIM_INFINITY else sys.maxsize),
        stray_token=not named and token.exists(),
    )


def _parse_output(text: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("{"):  # libraries also print to stdout
            with suppress(ValueError):  # cut off by the kill
                told |= json.loads(line)
    return told


def _read_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _exit_reason(code: int, complaint: str) -> str:
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return lines[-1][:_MAX_ERROR_CHARS] if lines else f"the probe ended with {how}"


def _package_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _filesystem_bytes(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _memfd_error() -> str:
    try:
        os.close(os.memfd_create("rayzero-doctor"))
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    return ""

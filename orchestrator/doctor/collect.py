"""Collects facts about this machine, torch, the cluster and the checkpoint store.

Problems are returned as facts, never raised.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from rayzero.engine.redact import redact_url
from rayzero.workers.nccl_settings import NcclSetting, contradictions
from rayzero.workers.probe_process import ProbeResult, run_probe
from rayzero.workers.vault.health import NODE_PROBE

_PROBES = "rayzero.orchestrator.doctor.probes"
_TORCH_TIMEOUT_S = 90.0  # importing torch on a busy machine, and 30 s for a collective
_CLUSTER_TIMEOUT_S = 45.0
_STORAGE_TIMEOUT_S = 45.0
_MAX_SLOWDOWN = 10.0


@dataclass(frozen=True)
class MachineFacts:
    """Facts that need no subprocess.

    Args:
        python: version of this interpreter.
        ray: version of Ray; empty if it is not installed.
        shm_bytes: size of /dev/shm; None if there is none.
        memfd_error: why memfd_create fails; empty if it works.
        open_files: soft and hard limit.
        stray_token: a token in the home folder enables authentication without a setting.
        nccl_settings: settings of workers that the environment contradicts, with the `NAME=value`
            in the environment.
        cores: CPU cores that this process may use.
    """

    python: str
    ray: str
    shm_bytes: int | None
    memfd_error: str
    open_files: tuple[int, int]
    stray_token: bool
    nccl_settings: tuple[tuple[NcclSetting, str], ...] = ()
    cores: int = 0


@dataclass(frozen=True)
class SystemFacts:
    """All facts. `cluster` is None without an address, `storage` is the store of `checkpoint_path`,
    and `health` is that of this machine."""

    machine: MachineFacts
    torch: ProbeResult
    cluster: ProbeResult | None
    storage: ProbeResult
    health: ProbeResult
    address: str
    checkpoint_path: str


def collect_facts(place: str, address: str, env: Mapping[str, str]) -> SystemFacts:
    """Runs all probes in parallel.

    Args:
        place: folder or URL for checkpoints.
        address: address of a Ray cluster; empty for none.
        env: environment variables that a job sets for its workers.
    """
    factor = slowdown()
    torch_s = factor * _TORCH_TIMEOUT_S
    with TemporaryDirectory(prefix="rayzero-doctor-") as folder, ThreadPoolExecutor(5) as threads:
        torch, _ = (
            threads.submit(
                run_probe,
                "rayzero.engine.torch_probe",
                (str(rank), folder, str(torch_s / 3)),
                torch_s,
            )
            for rank in range(2)
        )
        storage_s, cluster_s = factor * _STORAGE_TIMEOUT_S, factor * _CLUSTER_TIMEOUT_S
        storage = threads.submit(run_probe, _PROBES, ("storage",), storage_s, place)
        health = threads.submit(run_probe, NODE_PROBE, (), storage_s)
        cluster = None
        if address:
            cluster = threads.submit(run_probe, _PROBES, ("cluster", address), cluster_s)
        return SystemFacts(
            machine=inspect_machine({**os.environ, **env}),
            torch=torch.result(),
            cluster=None if cluster is None else cluster.result(),
            storage=storage.result(),
            health=health.result(),
            address=address,
            checkpoint_path=redact_url(place),
        )


def slowdown(file: str = "/proc/self/schedstat") -> float:
    """Returns the factor by which waits for a CPU have slowed down this thread so far. Timeouts of
    probes are multiplied by it. Returns 1 if the system does not report waits, and at most
    _MAX_SLOWDOWN."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        ran_ns, waited_ns = map(int, Path(file).read_text().split()[:2])
        return min(1 + waited_ns / ran_ns, _MAX_SLOWDOWN)
    return 1.0


def inspect_machine(environment: Mapping[str, str]) -> MachineFacts:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    token = Path.home() / ".ray" / "auth_token"
    auth_settings = environment.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    ray = ""
    shm_bytes = None
    memfd_error = ""
    with suppress(metadata.PackageNotFoundError):
        ray = metadata.version("ray")
    with suppress(OSError):
        shm = os.statvfs("/dev/shm")
        shm_bytes = shm.f_blocks * shm.f_frsize
    try:
        os.close(os.memfd_create("rayzero-doctor"))
    except OSError as error:
        memfd_error = f"memfd_create: {error.strerror}"
    return MachineFacts(
        python=platform.python_version(),
        ray=ray,
        shm_bytes=shm_bytes,
        memfd_error=memfd_error,
        open_files=(soft, hard if hard != resource.RLIM_INFINITY else sys.maxsize),
        stray_token=not auth_settings and token.exists(),
        nccl_settings=tuple(contradictions(environment)),
        cores=len(os.sched_getaffinity(0)),
    )

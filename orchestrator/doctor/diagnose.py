"""Turns facts into findings. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rayzero.orchestrator.doctor.collect import (
    Finding,
    MachineFacts,
    ProbeResult,
    Severity,
    SystemFacts,
)

MIN_PYTHON, MIN_TORCH, MIN_RAY = (3, 11), (2, 11), (2, 50)
"""Oldest supported versions."""

_MIB, _GIB = 2**20, 2**30


_MIN_SHM_BYTES = _GIB


_MIN_OPEN_FILES = 4096


_MIN_FREE_BYTES = 5 * _GIB


_SLOW_WRITE_S = 1.0


def diagnose(facts: SystemFacts) -> list[Finding]:
    """All findings; prerequisites first."""
    return [
        _check_python(facts.machine),
        *_check_torch(facts.torch),
        *_check_ray(facts.machine, facts.address),
        *_check_cluster(facts.cluster, facts.address),
        *_check_machine(facts.machine),
        *_check_storage(facts.storage, facts.checkpoint_path),
    ]


def worst_severity(findings: list[Finding]) -> Severity:
    levels = {finding.level for finding in findings}
    return next((level for level in (Severity.FAIL, Severity.WARN) if level in levels), Severity.OK)


def _check_python(machine: MachineFacts) -> Finding:
    shown = ".".join(map(str, machine.python))
    if machine.python < MIN_PYTHON:
        return Finding(
            "python", Severity.FAIL, shown, f"Python {_version_text(MIN_PYTHON)} or newer"
        )
    return Finding("python", Severity.OK, shown)


def _check_torch(probe: ProbeResult) -> Iterator[Finding]:
    told = probe.facts
    version = str(told.get("torch", ""))
    if not version:
        fix = (
            f"pip install 'torch>={_version_text(MIN_TORCH)}'; `python -c 'import torch'` "
            "shows more"
        )
        yield Finding("torch", Severity.FAIL, probe.error or "the probe printed nothing", fix)
        return
    if _is_older(version, MIN_TORCH):
        yield Finding("torch", Severity.FAIL, version, f"torch {_version_text(MIN_TORCH)} or newer")
    else:
        yield Finding("torch", Severity.OK, version)
    yield from _check_devices(probe)
    fix = "the host's name must resolve to its own address (/etc/hosts), or GLOO_SOCKET_IFNAME"
    yield _check_backend("gloo", probe, fix)
    if len(told.get("devices", ())) > 1:
        yield _check_backend("nccl", probe, "NCCL_DEBUG=INFO says more; driver, NCCL_SOCKET_IFNAME")


def _check_devices(probe: ProbeResult) -> Iterator[Finding]:
    told = probe.facts
    devices, built = told.get("devices", []), told.get("built_for_cuda")
    if devices:
        counted = ", ".join(f"{devices.count(name)} x {name}" for name in sorted(set(devices)))
        yield Finding("devices", Severity.OK, f"{counted} (CUDA {built})")
        if told.get("nccl"):
            yield Finding("nccl library", Severity.OK, str(told["nccl"]))
        else:
            fix = "a build of torch with NCCL, or workers.gpus: 0"
            yield Finding("nccl library", Severity.FAIL, "torch has no NCCL", fix)
    elif built:
        fix = "nothing, if this machine has no GPU; else its driver (nvidia-smi)"
        seen = f"torch is built for CUDA {built}, and no GPU is usable: gloo on CPUs"
        yield Finding("devices", Severity.WARN, seen, fix)
    else:
        yield Finding(
            "devices", Severity.OK, "no GPU, and torch is built without CUDA: gloo on CPUs"
        )


def _check_backend(name: str, probe: ProbeResult, fix: str) -> Finding:
    facts = probe.facts
    if f"{name}_s" in facts:
        seen = f"two processes joined and added up in {facts[f'{name}_s']:.2f} s"
        return Finding(name, Severity.OK, seen)
    if name == "gloo" and not facts.get("gloo", True):
        return Finding(name, Severity.FAIL, "torch has no gloo", "a build of torch with it")
    trouble = facts.get(f"{name}_trouble") or probe.error or "the probe printed nothing"
    return Finding(name, Severity.FAIL, f"two processes could not add up: {trouble}", fix)


def _check_ray(machine: MachineFacts, address: str) -> Iterator[Finding]:
    least = f"ray[default,train] {_version_text(MIN_RAY)} or newer"
    if not machine.ray:
        yield Finding("ray", Severity.FAIL, "it is not installed", f"pip install: {least}")
    elif _is_older(machine.ray, MIN_RAY):
        yield Finding("ray", Severity.FAIL, machine.ray, least)
    else:
        yield Finding("ray", Severity.OK, machine.ray)
    if machine.stray_token:
        seen = "a token in ~/.ray turns authentication on, which other nodes may not expect"
        fix = "RAY_AUTH_MODE=token or RAY_AUTH_MODE=disabled, the same on every node"
        yield Finding("ray token", Severity.WARN, seen, fix)
    if not address:
        seen = "no address given: `rayzero run` starts a local cluster"
        yield Finding("cluster", Severity.OK, seen)


def _check_cluster(probe: ProbeResult | None, address: str) -> Iterator[Finding]:
    if probe is None:
        return
    if probe.error:
        fix = "--address or RAY_ADDRESS; the same Ray version and RAY_AUTH_MODE as the head's"
        yield Finding("cluster", Severity.FAIL, f"{address}: {probe.error}", fix)
        return
    nodes, leaving = int(probe.facts["nodes"]), int(probe.facts["leaving"])
    cpus, gpus = probe.facts["cpus"], probe.facts["gpus"]
    free = f"{probe.facts['free_cpus']:g} CPUs and {probe.facts['free_gpus']:g} GPUs free"
    seen = f"{nodes} nodes, {cpus:g} CPUs, {gpus:g} GPUs; {free}"
    yield Finding("cluster", Severity.OK, seen)
    if cpus < 1:
        fix = "worker nodes, or an autoscaler that adds them when a job asks"
        yield Finding("cluster resources", Severity.WARN, "no CPUs for workers", fix)
    if leaving:
        seen = f"nodes being drained: {leaving}"
        yield Finding("cluster resources", Severity.WARN, seen, "nothing; jobs do not use them")


def _check_machine(machine: MachineFacts) -> Iterator[Finding]:
    if machine.memfd_error:
        fix = "a kernel and seccomp profile that allow memfd_create (RuntimeDefault does)"
        yield Finding("shared memory", Severity.FAIL, machine.memfd_error, fix)
    elif machine.shm_bytes is None:
        fix = "mount it: docker run --shm-size=8g, head.shmSize and workers.shmSize of the chart"
        yield Finding("shared memory", Severity.WARN, "there is no /dev/shm", fix)
    elif machine.shm_bytes < _MIN_SHM_BYTES:
        fix = "docker run --shm-size=8g, head.shmSize and workers.shmSize of the chart"
        seen = f"/dev/shm has {machine.shm_bytes / _MIB:.0f} MiB, for Ray's objects and NCCL"
        yield Finding("shared memory", Severity.WARN, seen, fix)
    else:
        yield Finding(
            "shared memory", Severity.OK, f"/dev/shm has {machine.shm_bytes / _GIB:.1f} GiB"
        )
    soft, hard = machine.open_files
    if hard < _MIN_OPEN_FILES:
        fix = (
            f"ulimit -Hn {_MIN_OPEN_FILES} or more (LimitNOFILE of the service, docker run "
            "--ulimit)"
        )
        yield Finding("open files", Severity.WARN, f"at most {hard}", fix)
    else:
        yield Finding("open files", Severity.OK, f"{soft}, at most {hard}")


def _check_storage(probe: ProbeResult, place: str) -> Iterator[Finding]:
    if probe.error:
        fix = probe.facts.get("fix") or "checkpoint.path, and the rights or credentials for it"
        yield Finding("checkpoints", Severity.FAIL, f"{place}: {probe.error}", str(fix))
        return
    seconds, nbytes = probe.facts["write_s"], probe.facts["nbytes"]
    seen = f"{place}: {nbytes / _MIB:.0f} MiB written, read and removed"
    if seconds > _SLOW_WRITE_S:
        fix = "nothing, if checkpoints may take long: training does not wait for them"
        yield Finding("checkpoints", Severity.WARN, f"{seen}, in {seconds:.1f} s", fix)
    else:
        yield Finding("checkpoints", Severity.OK, f"{seen}; written in {seconds:.2f} s")
    free = probe.facts.get("free_bytes")
    if free is not None and free < _MIN_FREE_BYTES:
        seen = f"{free / _GIB:.1f} GiB are free there"
        yield Finding("disk space", Severity.WARN, seen, "free some, or checkpoint.path")


def _is_older(version: str, least: tuple[int, int]) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < least


def _version_text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

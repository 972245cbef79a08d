"""From facts to findings. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rayzero.orchestrator.doctor.facts import Facts, Finding, Level, Machine, Probe

PYTHON, TORCH, RAY = (3, 11), (2, 11), (2, 50)
"""The oldest versions that are supported."""

_MIB, _GIB = 2**20, 2**30
_LEAST_SHM_BYTES = _GIB
_LEAST_FILES = 4096
_LEAST_FREE_BYTES = 5 * _GIB
_SLOW_SYNC_S = 1.0


def judge(facts: Facts) -> list[Finding]:
    """Everything there is to say, in the order of what depends on what."""
    return [
        _python(facts.machine),
        *_torch(facts.torch),
        *_ray(facts.machine, facts.address),
        *_cluster(facts.cluster, facts.address),
        *_machine(facts.machine),
        *_storage(facts.storage, facts.place),
    ]


def worst(findings: list[Finding]) -> Level:
    levels = {finding.level for finding in findings}
    return next((one for one in (Level.FAIL, Level.WARN) if one in levels), Level.OK)


def _python(machine: Machine) -> Finding:
    shown = ".".join(map(str, machine.python))
    if machine.python < PYTHON:
        return Finding("python", Level.FAIL, shown, f"Python {_dotted(PYTHON)} or newer")
    return Finding("python", Level.OK, shown)


def _torch(probe: Probe) -> Iterator[Finding]:
    told = probe.told
    version = str(told.get("torch", ""))
    if not version:
        fix = f"pip install 'torch>={_dotted(TORCH)}'; `python -c 'import torch'` shows more"
        yield Finding("torch", Level.FAIL, probe.trouble or "it told nothing", fix)
        return
    if _older(version, TORCH):
        yield Finding("torch", Level.FAIL, version, f"torch {_dotted(TORCH)} or newer")
    else:
        yield Finding("torch", Level.OK, version)
    yield from _devices(probe)
    fix = "the host's name must resolve to its own address (/etc/hosts), or GLOO_SOCKET_IFNAME"
    yield _backend("gloo", probe, fix)
    if len(told.get("devices", ())) > 1:
        yield _backend("nccl", probe, "NCCL_DEBUG=INFO says more; driver, NCCL_SOCKET_IFNAME")


def _devices(probe: Probe) -> Iterator[Finding]:
    told = probe.told
    devices, built = told.get("devices", []), told.get("built_for_cuda")
    if devices:
        counted = ", ".join(f"{devices.count(name)} x {name}" for name in sorted(set(devices)))
        yield Finding("devices", Level.OK, f"{counted} (CUDA {built})")
        if told.get("nccl"):
            yield Finding("nccl library", Level.OK, str(told["nccl"]))
        else:
            fix = "a build of torch with NCCL, or workers.gpus: 0"
            yield Finding("nccl library", Level.FAIL, "torch has no NCCL", fix)
    elif built:
        fix = "nothing, if this machine has no GPU; else its driver (nvidia-smi)"
        seen = f"torch is built for CUDA {built}, and no GPU is usable: gloo on CPUs"
        yield Finding("devices", Level.WARN, seen, fix)
    else:
        yield Finding("devices", Level.OK, "no GPU, and torch is built without CUDA: gloo on CPUs")


def _backend(name: str, probe: Probe, fix: str) -> Finding:
    told = probe.told
    if f"{name}_s" in told:
        seen = f"two processes joined and added up in {told[f'{name}_s']:.2f} s"
        return Finding(name, Level.OK, seen)
    if name == "gloo" and not told.get("gloo", True):
        return Finding(name, Level.FAIL, "torch has no gloo", "a build of torch with it")
    trouble = told.get(f"{name}_trouble") or probe.trouble or "it told nothing"
    return Finding(name, Level.FAIL, f"two processes could not add up: {trouble}", fix)


def _ray(machine: Machine, address: str) -> Iterator[Finding]:
    least = f"ray[default,train] {_dotted(RAY)} or newer"
    if not machine.ray:
        yield Finding("ray", Level.FAIL, "it is not installed", f"pip install: {least}")
    elif _older(machine.ray, RAY):
        yield Finding("ray", Level.FAIL, machine.ray, least)
    else:
        yield Finding("ray", Level.OK, machine.ray)
    if machine.stray_token:
        seen = "a token in ~/.ray turns authentication on, which other nodes may not expect"
        fix = "RAY_AUTH_MODE=token or RAY_AUTH_MODE=disabled, the same on every node"
        yield Finding("ray token", Level.WARN, seen, fix)
    if not address:
        seen = "none is named, so `rayzero run` starts one of its own"
        yield Finding("cluster", Level.OK, seen)


def _cluster(probe: Probe | None, address: str) -> Iterator[Finding]:
    if probe is None:
        return
    if probe.trouble:
        fix = "--address or RAY_ADDRESS; the same Ray version and RAY_AUTH_MODE as the head's"
        yield Finding("cluster", Level.FAIL, f"{address}: {probe.trouble}", fix)
        return
    nodes, leaving = int(probe.told["nodes"]), int(probe.told["leaving"])
    cpus, gpus = probe.told["cpus"], probe.told["gpus"]
    free = f"{probe.told['free_cpus']:g} CPUs and {probe.told['free_gpus']:g} GPUs free"
    seen = f"{nodes} nodes, {cpus:g} CPUs, {gpus:g} GPUs; {free}"
    yield Finding("cluster", Level.OK, seen)
    if cpus < 1:
        fix = "worker nodes, or an autoscaler that adds them when a job asks"
        yield Finding("cluster resources", Level.WARN, "no CPUs for workers", fix)
    if leaving:
        seen = f"{leaving} of the nodes are leaving"
        yield Finding("cluster resources", Level.WARN, seen, "nothing; a job does without them")


def _machine(machine: Machine) -> Iterator[Finding]:
    if machine.memfd_trouble:
        fix = "a kernel and seccomp profile that allow memfd_create (RuntimeDefault does)"
        yield Finding("shared memory", Level.FAIL, machine.memfd_trouble, fix)
    elif machine.shm_bytes is None:
        fix = "mount it: docker run --shm-size=8g, head.shmSize and workers.shmSize of the chart"
        yield Finding("shared memory", Level.WARN, "there is no /dev/shm", fix)
    elif machine.shm_bytes < _LEAST_SHM_BYTES:
        fix = "docker run --shm-size=8g, head.shmSize and workers.shmSize of the chart"
        seen = f"/dev/shm has {machine.shm_bytes / _MIB:.0f} MiB, for Ray's objects and NCCL"
        yield Finding("shared memory", Level.WARN, seen, fix)
    else:
        yield Finding("shared memory", Level.OK, f"/dev/shm has {machine.shm_bytes / _GIB:.1f} GiB")
    soft, hard = machine.open_files
    if hard < _LEAST_FILES:
        fix = f"ulimit -Hn {_LEAST_FILES} or more (LimitNOFILE of the service, docker run --ulimit)"
        yield Finding("open files", Level.WARN, f"at most {hard}", fix)
    else:
        yield Finding("open files", Level.OK, f"{soft}, at most {hard}")


def _storage(probe: Probe, place: str) -> Iterator[Finding]:
    if probe.trouble:
        fix = probe.told.get("fix") or "checkpoint.path, and the rights or credentials for it"
        yield Finding("checkpoints", Level.FAIL, f"{place}: {probe.trouble}", str(fix))
        return
    seconds, nbytes = probe.told["write_s"], probe.told["nbytes"]
    seen = f"{place}: {nbytes / _MIB:.0f} MiB written, read and removed"
    if seconds > _SLOW_SYNC_S:
        fix = "nothing, if checkpoints may take long: training does not wait for them"
        yield Finding("checkpoints", Level.WARN, f"{seen}, in {seconds:.1f} s", fix)
    else:
        yield Finding("checkpoints", Level.OK, f"{seen}; written in {seconds:.2f} s")
    free = probe.told.get("free_bytes")
    if free is not None and free < _LEAST_FREE_BYTES:
        seen = f"{free / _GIB:.1f} GiB are free there"
        yield Finding("disk space", Level.WARN, seen, "free some, or checkpoint.path")


def _older(version: str, least: tuple[int, int]) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < least


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

"""Turns facts into findings. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rayzero.orchestrator.doctor.collect import MachineFacts, SystemFacts
from rayzero.orchestrator.doctor.probes import RAY_RECONNECT_S
from rayzero.orchestrator.policies import health
from rayzero.orchestrator.spec_sections import HealthSpec
from rayzero.workers.probe_process import ProbeResult
from rayzero.workers.vault.health import HealthReport

MIN_PYTHON = "3.11"
"""The oldest supported version of Python; likewise for torch and Ray."""
MIN_TORCH = "2.11"
MIN_RAY = "2.50"

_MIB, _GIB = 2**20, 2**30
_MIN_SHM_BYTES = _GIB
_MIN_OPEN_FILES = 4096
_MIN_FREE_BYTES = 5 * _GIB
_SLOW_WRITE_S = 1.0


class Severity(StrEnum):
    """How serious a finding is."""

    OK = "ok"  # no problem
    WARN = "warn"  # jobs may be slow or fail
    FAIL = "fail"  # jobs cannot run


@dataclass(frozen=True)
class Finding:
    """A line of the report. `seen` is the observation, with numbers. If there is a problem, `fix`
    says what to change."""

    name: str
    level: Severity
    seen: str
    fix: str = ""


def _ok(name: str, seen: str) -> Finding:
    return Finding(name, Severity.OK, seen)


def _warn(name: str, seen: str, fix: str) -> Finding:
    return Finding(name, Severity.WARN, seen, fix)


def _fail(name: str, seen: str, fix: str) -> Finding:
    return Finding(name, Severity.FAIL, seen, fix)


def diagnose(facts: SystemFacts) -> list[Finding]:
    """Returns all findings, prerequisites first."""
    return [
        _check_version("python", facts.machine.python, MIN_PYTHON, "Python"),
        *_check_torch(facts.torch),
        *_check_gpus(facts.machine, len(facts.torch.facts.get("devices", ()))),
        *_check_ray(facts.machine, facts.address),
        *_check_cluster(facts.cluster, facts.address),
        *_check_machine(facts.machine),
        *_check_storage(facts.storage, facts.checkpoint_path),
        *_check_nodes(facts),
    ]


def worst_severity(findings: Sequence[Finding]) -> Severity:
    levels = {finding.level for finding in findings}
    return next((level for level in (Severity.FAIL, Severity.WARN) if level in levels), Severity.OK)


def _check_version(package: str, version: str, oldest: str, name: str) -> Finding:
    """Compares a version with the oldest supported one. `name` is what to install, such as a
    package with its extras."""
    numbers, required = (
        [int(number) for number in re.findall(r"\d+", text)[:2]] for text in (version, oldest)
    )
    if numbers and numbers < required:
        return _fail(package, version, f"install {name} {oldest} or newer")
    return _ok(package, version)


def _check_torch(probe: ProbeResult) -> Iterator[Finding]:
    version = str(probe.facts.get("torch", ""))
    if not version:
        fix = f"pip install 'torch>={MIN_TORCH}'; `python -c 'import torch'` shows more"
        yield _fail("torch", probe.error or "the probe printed nothing", fix)
        return
    yield _check_version("torch", version, MIN_TORCH, "torch")
    yield from _check_devices(probe)
    fix = "let the host's name resolve to its own address (/etc/hosts), or set GLOO_SOCKET_IFNAME"
    yield _check_backend("gloo", probe, fix)
    if len(probe.facts.get("devices", ())) > 1:
        fix = "check the driver and NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO shows more"
        yield _check_backend("nccl", probe, fix)


def _check_devices(probe: ProbeResult) -> Iterator[Finding]:
    devices, built = probe.facts.get("devices", []), probe.facts.get("built_for_cuda")
    if devices:
        counts = ", ".join(f"{devices.count(name)} x {name}" for name in sorted(set(devices)))
        yield _ok("devices", f"{counts} (CUDA {built})")
        if nccl := probe.facts.get("nccl"):
            yield _ok("nccl library", str(nccl))
        else:
            fix = "install a build of torch with NCCL, or set workers.gpus: 0"
            yield _fail("nccl library", "torch has no NCCL", fix)
    elif built:
        fix = "check its driver (nvidia-smi), if this machine has a GPU"
        seen = f"torch is built for CUDA {built}, and no GPU is usable: gloo on CPUs"
        yield _warn("devices", seen, fix)
    else:
        yield _ok("devices", "no GPU, and torch is built without CUDA: gloo on CPUs")


def _check_gpus(machine: MachineFacts, gpus: int) -> Iterator[Finding]:
    """Yields the findings on which jobs with GPUs depend. NCCL's settings are checked even if this
    machine has no GPU."""
    for setting, seen in machine.nccl_settings:
        variable = seen.partition("=")[0]
        fix = f"unset it, or set {variable}: '{setting.value}' in workers.env of the job"
        if setting.required:
            seen = f"{seen}, with which no job with GPUs starts"
            yield _fail("nccl settings", f"{seen}: {setting.otherwise}", fix)
        else:
            yield _warn("nccl settings", f"{seen}: {setting.otherwise}", fix)
    if gpus:
        share = max(1, machine.cores // gpus)
        yield _ok("cpu cores", f"{share} for each GPU: what offload_optimizer uses by default")


def _check_backend(name: str, probe: ProbeResult, fix: str) -> Finding:
    facts = probe.facts
    if f"{name}_s" in facts:
        return _ok(name, f"two processes joined and added up in {facts[f'{name}_s']:.2f} s")
    if name == "gloo" and not facts.get("gloo", True):
        return _fail(name, "torch has no gloo", "install a build of torch with gloo")
    error = facts.get(f"{name}_trouble") or probe.error or "the probe printed nothing"
    return _fail(name, f"two processes could not add up: {error}", fix)


def _check_ray(machine: MachineFacts, address: str) -> Iterator[Finding]:
    if machine.ray:
        yield _check_version("ray", machine.ray, MIN_RAY, "ray[default,train]")
    else:
        fix = f"pip install 'ray[default,train]>={MIN_RAY}'"
        yield _fail("ray", "it is not installed", fix)
    if machine.stray_token:
        seen = "a token in ~/.ray turns authentication on, which other nodes may not expect"
        fix = "set RAY_AUTH_MODE=token or RAY_AUTH_MODE=disabled, the same on every node"
        yield _warn("ray token", seen, fix)
    if not address:
        yield _ok("cluster", "no address given: `rayzero run` starts a local cluster")


def _check_cluster(probe: ProbeResult | None, address: str) -> Iterator[Finding]:
    if probe is None:
        return
    if probe.error:
        fix = "check --address or RAY_ADDRESS; use the head's Ray version and RAY_AUTH_MODE"
        yield _fail("cluster", f"{address}: {probe.error}", fix)
        return
    facts = probe.facts
    free = f"{facts['free_cpus']:g} CPUs and {facts['free_gpus']:g} GPUs free"
    seen = f"{facts['nodes']} nodes, {facts['cpus']:g} CPUs, {facts['gpus']:g} GPUs; {free}"
    yield _ok("cluster", seen)
    if facts["cpus"] < 1:
        fix = "add worker nodes, or an autoscaler that adds them when a job needs them"
        yield _warn("cluster resources", "no CPUs for workers", fix)
    for job, number in facts["left"].items():
        seen = f"job {job} has no process, and has left {number} actors and reservations"
        fix = f"run `rayzero stop {job} --address {address}`; they also end by themselves"
        yield _warn("leftovers", seen, fix)
    short = [limit_s for limit_s in facts["reconnect_s"].values() if limit_s <= RAY_RECONNECT_S]
    if short:
        seen = (
            f"the head can come back, but {len(short)} nodes end {max(short):g} s after it is "
            "lost, and the workers there"
        )
        fix = (
            "set RAY_gcs_rpc_server_reconnect_timeout_s=600 in the environment of `ray start` there"
        )
        yield _warn("lost head", seen, fix)
    if facts["leaving"]:
        seen = f"nodes being drained: {facts['leaving']}"
        yield _warn("cluster resources", seen, "do nothing; jobs do not use them")


def _check_machine(machine: MachineFacts) -> Iterator[Finding]:
    settings = "docker run --shm-size=8g, head.shmSize and workers.shmSize of the chart"
    if machine.memfd_error:
        fix = "use a kernel and seccomp profile that allow memfd_create (RuntimeDefault does)"
        yield _fail("shared memory", machine.memfd_error, fix)
    elif machine.shm_bytes is None:
        yield _warn("shared memory", "there is no /dev/shm", f"mount it: {settings}")
    elif machine.shm_bytes < _MIN_SHM_BYTES:
        seen = f"/dev/shm has {machine.shm_bytes / _MIB:.0f} MiB, for Ray's objects and NCCL"
        yield _warn("shared memory", seen, f"enlarge it: {settings}")
    else:
        yield _ok("shared memory", f"/dev/shm has {machine.shm_bytes / _GIB:.1f} GiB")
    soft, hard = machine.open_files
    if hard < _MIN_OPEN_FILES:
        service = "LimitNOFILE of the service, docker run --ulimit"
        fix = f"raise it: ulimit -Hn {_MIN_OPEN_FILES} or more ({service})"
        yield _warn("open files", f"at most {hard}", fix)
    else:
        yield _ok("open files", f"{soft}, at most {hard}")


def _check_nodes(facts: SystemFacts) -> Iterator[Finding]:
    """Yields the findings of the node checks that a job makes, too, for this machine and for the
    cluster's nodes."""
    reports = {"this machine": HealthReport.of(facts.health.facts, facts.health.error)}
    nodes = {} if facts.cluster is None else facts.cluster.facts.get("health", {})
    for name, measured in nodes.items():
        figures = {key: value for key, value in measured.items() if key != "trouble"}
        reports[f"node {name}"] = HealthReport.of(figures, str(measured.get("trouble", "")))
    failed = health.judge(reports, HealthSpec().slow_factor)
    for name, report in reports.items():
        for check in failed.get(name, ()):
            yield _warn("health", f"{name}: {check.text}", f"{check.fix}; jobs avoid such nodes")
        if report.incomplete:
            fix = "run `python -m rayzero.workers.vault.node_probe` on that machine"
            yield _warn("health", f"{name}: {report.incomplete}", fix)
        elif name not in failed:
            yield _ok("health", f"{name}: {health.describe_speeds(report)}")


def _check_storage(probe: ProbeResult, place: str) -> Iterator[Finding]:
    if probe.error:
        fix = probe.facts.get("fix") or "check checkpoint.path, and the rights or credentials"
        yield _fail("checkpoints", f"{place}: {probe.error}", str(fix))
        return
    write_s, nbytes = probe.facts["write_s"], probe.facts["nbytes"]
    seen = f"{place}: {nbytes / _MIB:.0f} MiB written, read and removed"
    if write_s > _SLOW_WRITE_S:
        fix = "use a faster store, unless checkpoints may take long: training does not wait"
        yield _warn("checkpoints", f"{seen}, in {write_s:.1f} s", fix)
    else:
        yield _ok("checkpoints", f"{seen}; written in {write_s:.2f} s")
    free = probe.facts.get("free_bytes")
    if free is not None and free < _MIN_FREE_BYTES:
        seen = f"{free / _GIB:.1f} GiB are free there"
        yield _warn("disk space", seen, "free some space, or change checkpoint.path")

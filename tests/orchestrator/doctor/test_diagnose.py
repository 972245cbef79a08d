"""Findings of the doctor for each single problem."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rayzero.orchestrator.cli.app import app
from rayzero.orchestrator.cli.doctor import report_lines
from rayzero.orchestrator.doctor import collect
from rayzero.orchestrator.doctor.collect import (
    MachineFacts,
    ProbeResult,
    SystemFacts,
    inspect_machine,
)
from rayzero.orchestrator.doctor.diagnose import Severity, diagnose, worst_severity
from rayzero.workers.nccl_settings import contradictions

MACHINE = MachineFacts(
    python="3.11.7",
    ray="2.60.0",
    shm_bytes=8 * 2**30,
    memfd_error="",
    open_files=(65536, 65536),
    stray_token=False,
    cores=26,
)
TORCH = {
    "torch": "2.13.0+cu130",
    "built_for_cuda": "13.0",
    "devices": ["H100", "H100"],
    "nccl": "2.28.9",
    "gloo": True,
    "gloo_s": 0.2,
    "nccl_s": 0.4,
}
CPU = {"torch": "2.13.0+cpu", "built_for_cuda": None, "devices": [], "gloo": True, "gloo_s": 0.2}
CLUSTER: dict[str, Any] = {
    "nodes": 3,
    "cpus": 8.0,
    "gpus": 2.0,
    "free_cpus": 8.0,
    "free_gpus": 2.0,
    "leaving": 0,
    "left": {},
    "reconnect_s": {"a": 600.0},
}
STORAGE = {"write_s": 0.1, "nbytes": 4 * 2**20, "free_bytes": 2**40}
HEALTH = {"compute": 50.0, "memory": 12.0, "disk": 76.0}
SLOW = {name: {**HEALTH, "trouble": ""} for name in ("a", "b")} | {"c": HEALTH | {"memory": 3.1}}
HEALTHY = SystemFacts(
    MACHINE,
    ProbeResult(TORCH),
    ProbeResult(CLUSTER),
    ProbeResult(STORAGE),
    ProbeResult(HEALTH),
    "head:6379",
    "runs",
)


def machine(**changed: Any) -> SystemFacts:
    return replace(HEALTHY, machine=replace(MACHINE, **changed))


def torch(error: str = "", **changed: Any) -> SystemFacts:
    return replace(HEALTHY, torch=ProbeResult(TORCH | changed, error))


def without(key: str, error: str = "", **changed: Any) -> SystemFacts:
    facts = {name: value for name, value in TORCH.items() if name != key}
    return replace(HEALTHY, torch=ProbeResult(facts | changed, error))


def cluster(error: str = "", **changed: Any) -> SystemFacts:
    return replace(HEALTHY, cluster=ProbeResult(CLUSTER | changed if not error else {}, error))


def storage(error: str = "", **changed: Any) -> SystemFacts:
    return replace(HEALTHY, storage=ProbeResult(STORAGE | changed, error))


def here(facts: dict[str, Any], error: str = "") -> SystemFacts:
    return replace(HEALTHY, health=ProbeResult(facts, error))


OK, WARN, FAIL = Severity
GLOO = {key: value for key, value in CPU.items() if key != "gloo_s"}


def probed(facts: dict[str, Any], error: str = "") -> SystemFacts:
    return replace(HEALTHY, torch=ProbeResult(facts, error))


def nccl(**settings: str) -> SystemFacts:
    return machine(nccl_settings=tuple(contradictions(settings)))


# The facts, the name and level of the only finding that is not OK, and a part of its text or fix.
PROBLEMS: dict[str, tuple[SystemFacts, str, Severity, str]] = {
    "old Python": (machine(python="3.10.2"), "python", FAIL, "3.11"),
    "no torch": (probed({}, "No module named 'torch'"), "torch", FAIL, "No module named 'torch'"),
    "old torch": (torch(torch="2.4.1"), "torch", FAIL, "2.11"),
    "no driver": (probed(CPU | {"built_for_cuda": "13.0"}), "devices", WARN, "driver"),
    "no NCCL": (torch(nccl=None), "nccl library", FAIL, "with NCCL"),
    "NCCL fails": (without("nccl_s", nccl_trouble="x"), "nccl", FAIL, "NCCL_DEBUG"),
    "NCCL hangs": (without("nccl_s", error="no answer within 90 s"), "nccl", FAIL, "90 s"),
    "gloo fails": (probed(GLOO | {"gloo_trouble": "no resolver"}), "gloo", FAIL, "no resolver"),
    "no gloo": (probed(GLOO | {"gloo": False}), "gloo", FAIL, "has no gloo"),
    "gloo hangs": (probed(GLOO, "no answer within 90 s"), "gloo", FAIL, "no answer within 90 s"),
    "no Ray": (machine(ray=""), "ray", FAIL, "pip install"),
    "old Ray": (machine(ray="2.9.3"), "ray", FAIL, "2.50"),
    "stray token": (machine(stray_token=True), "ray token", WARN, "RAY_AUTH_MODE"),
    "no cluster": (cluster("there is no Ray cluster"), "cluster", FAIL, "--address"),
    "empty cluster": (cluster(cpus=0.0), "cluster resources", WARN, "autoscaler"),
    "a lost job": (cluster(left={"gpt": 6}), "leftovers", WARN, "job gpt has no process"),
    "nodes end": (
        cluster(reconnect_s={"a": 60.0, "b": 600.0}),
        "lost head",
        WARN,
        "1 nodes end 60 s after it is lost",
    ),
    "draining nodes": (cluster(leaving=1), "cluster resources", WARN, "nodes being drained: 1"),
    "slow node": (
        cluster(health=SLOW),
        "health",
        WARN,
        "node c: memory bandwidth 3.1 GB/s, limit 6",
    ),
    "silent node": (cluster(health={"c": {"trouble": "no answer"}}), "health", WARN, "no answer"),
    "full local disk": (
        here(HEALTH | {"disk": 0.1}),
        "health",
        WARN,
        "this machine: free disk space 0.1 GiB",
    ),
    "no probe": (here({}, "no answer within 45 s"), "health", WARN, "no answer within 45 s"),
    "no memfd": (machine(memfd_error="memfd_create: no"), "shared memory", FAIL, "seccomp"),
    "no shm": (machine(shm_bytes=None), "shared memory", WARN, "shmSize"),
    "small shm": (machine(shm_bytes=64 * 2**20), "shared memory", WARN, "64 MiB"),
    "open files": (machine(open_files=(1024, 1024)), "open files", WARN, "ulimit"),
    "watchdog that ends survivors": (
        nccl(TORCH_NCCL_ASYNC_ERROR_HANDLING="3"),
        "nccl settings",
        WARN,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=3: torch's watchdog ends a surviving process",
    ),
    "waits that block": (
        nccl(NCCL_BLOCKING_WAIT="yes"),
        "nccl settings",
        FAIL,
        "NCCL_BLOCKING_WAIT=yes, with which no job with GPUs starts",
    ),
    "unwritable folder": (storage("Permission denied"), "checkpoints", FAIL, "checkpoint.path"),
    "slow disk": (storage(write_s=3.0), "checkpoints", WARN, "3.0 s"),
    "full disk": (storage(free_bytes=2**20), "disk space", WARN, "0.0 GiB"),
}


def test_healthy_machine() -> None:
    for facts in (HEALTHY, replace(HEALTHY, torch=ProbeResult(CPU), cluster=None, address="")):
        findings = diagnose(facts)
        assert worst_severity(findings) is OK
        assert not any(finding.fix for finding in findings)
        assert len(findings) >= 9


@pytest.mark.parametrize(("facts", "name", "level", "text"), PROBLEMS.values(), ids=PROBLEMS)
def test_each_problem_is_one_finding_with_fix(
    facts: SystemFacts, name: str, level: Severity, text: str
) -> None:
    findings = diagnose(facts)
    (problem,) = [finding for finding in findings if finding.level is not OK]
    assert (problem.name, problem.level) == (name, level)
    assert text in problem.seen + problem.fix
    assert problem.fix
    assert worst_severity(findings) is level
    assert len([line for line in report_lines(findings) if "fix:" in line]) == 1


def test_doctor_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit codes: 0 with warnings, 1 with a failure, 2 for an unsupported address."""

    def doctor(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["doctor", *arguments])

    both = machine(shm_bytes=None, ray="")
    for facts, code in ((HEALTHY, 0), (machine(shm_bytes=None), 0), (both, 1)):
        monkeypatch.setattr(collect, "collect_facts", lambda *_, facts=facts: facts)
        result = doctor("--json")
        assert result.exit_code == code
        report = json.loads(result.stdout)
        assert report["level"] == worst_severity(diagnose(facts))
        result = doctor()
        assert result.exit_code == code
        fixes = sum(finding["level"] != "ok" for finding in report["findings"])
        assert len(result.stdout.splitlines()) == len(report["findings"]) + fixes
    result = doctor("--address", "ray://head:10001")
    assert result.exit_code == 2
    assert "--address http://head:8265" in result.stderr


def test_doctor_checks_what_a_job_sets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As well as the machine's environment, before which it has precedence."""

    def facts(place: str, address: str, env: dict[str, str]) -> SystemFacts:
        return machine(nccl_settings=inspect_machine({**os.environ, **env}).nccl_settings)

    monkeypatch.setattr(collect, "collect_facts", facts)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    path = tmp_path / "job.yaml"
    for env, expected in (
        ("{}", "no job with GPUs starts"),
        ("{NCCL_CUMEM_ENABLE: '0', TORCH_NCCL_BLOCKING_WAIT: '0'}", "NCCL_CUMEM_ENABLE=0: peers"),
    ):
        path.write_text(f"{{name: job, entrypoint: 'm:f', workers: {{env: {env}}}}}")
        result = CliRunner().invoke(app, ["doctor", "--job", str(path)])
        (line,) = [line for line in result.stdout.splitlines() if "nccl settings" in line]
        assert expected in line
        assert result.exit_code == (env == "{}")
    assert "NCCL_CUMEM_ENABLE: '1' in workers.env" in result.stdout
    path.write_text("{name: job, entrypoint: 'm:f', workers: {env: {NCCL_BLOCKING_WAIT: '1'}}}")
    result = CliRunner().invoke(app, ["doctor", "--job", str(path)])
    assert result.exit_code == 2
    assert "workers.env: must not set NCCL_BLOCKING_WAIT=1: the host waits" in result.stderr

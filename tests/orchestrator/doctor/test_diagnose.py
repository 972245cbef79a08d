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
CLUSTER = {"nodes": 3, "cpus": 8.0, "gpus": 2.0, "free_cpus": 8.0, "free_gpus": 2.0, "leaving": 0}
STORAGE = {"write_s": 0.1, "nbytes": 4 * 2**20, "free_bytes": 2**40}
HEALTHY = SystemFacts(
    MACHINE, ProbeResult(TORCH), ProbeResult(CLUSTER), ProbeResult(STORAGE), "head:6379", "runs"
)


def machine(**changed: Any) -> SystemFacts:
    return replace(HEALTHY, machine=replace(MACHINE, **changed))


def torch(error: str = "", **changed: Any) -> SystemFacts:
    return replace(HEALTHY, torch=ProbeResult(TORCH | changed, error))


def without(*keys: str, error: str = "") -> SystemFacts:
    facts = {key: value for key, value in TORCH.items() if key not in keys}
    return replace(HEALTHY, torch=ProbeResult(facts, error))


def cluster(error: str = "", **changed: Any) -> SystemFacts:
    return replace(HEALTHY, cluster=ProbeResult(CLUSTER | changed if not error else {}, error))


def storage(error: str = "", **changed: Any) -> SystemFacts:
    return replace(HEALTHY, storage=ProbeResult(STORAGE | changed, error))


# The facts, the name and level of the only finding that is not OK, and a part of its text or fix.
PROBLEMS: dict[str, tuple[SystemFacts, str, Severity, str]] = {
    "old Python": (machine(python="3.10.2"), "python", Severity.FAIL, "3.11"),
    "no torch": (
        replace(HEALTHY, torch=ProbeResult({}, "ModuleNotFoundError: No module named 'torch'")),
        "torch",
        Severity.FAIL,
        "No module named 'torch'",
    ),
    "torch crashes": (
        replace(HEALTHY, torch=ProbeResult({}, "the probe process ended with signal 11")),
        "torch",
        Severity.FAIL,
        "signal 11",
    ),
    "old torch": (torch(torch="2.4.1"), "torch", Severity.FAIL, "2.11"),
    "no driver": (
        replace(HEALTHY, torch=ProbeResult(CPU | {"built_for_cuda": "13.0"})),
        "devices",
        Severity.WARN,
        "driver",
    ),
    "no NCCL": (torch(nccl=None), "nccl library", Severity.FAIL, "with NCCL"),
    "NCCL fails": (
        replace(HEALTHY, torch=ProbeResult(without("nccl_s").torch.facts | {"nccl_trouble": "x"})),
        "nccl",
        Severity.FAIL,
        "NCCL_DEBUG",
    ),
    "NCCL hangs": (
        without("nccl_s", error="no answer within 90 s"),
        "nccl",
        Severity.FAIL,
        "90 s",
    ),
    "no Ray": (machine(ray=""), "ray", Severity.FAIL, "pip install"),
    "old Ray": (machine(ray="2.9.3"), "ray", Severity.FAIL, "2.50"),
    "stray token": (machine(stray_token=True), "ray token", Severity.WARN, "RAY_AUTH_MODE"),
    "no cluster": (cluster("there is no Ray cluster"), "cluster", Severity.FAIL, "--address"),
    "empty cluster": (cluster(cpus=0.0), "cluster resources", Severity.WARN, "autoscaler"),
    "draining nodes": (
        cluster(leaving=1),
        "cluster resources",
        Severity.WARN,
        "nodes being drained: 1",
    ),
    "no memfd": (
        machine(memfd_error="memfd_create: no"),
        "shared memory",
        Severity.FAIL,
        "seccomp",
    ),
    "no shm": (machine(shm_bytes=None), "shared memory", Severity.WARN, "shmSize"),
    "small shm": (machine(shm_bytes=64 * 2**20), "shared memory", Severity.WARN, "64 MiB"),
    "low open files limit": (
        machine(open_files=(1024, 1024)),
        "open files",
        Severity.WARN,
        "ulimit",
    ),
    "watchdog that ends survivors": (
        machine(nccl_settings=tuple(contradictions({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}))),
        "nccl settings",
        Severity.WARN,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=3: torch's watchdog ends a surviving process",
    ),
    "waits that block": (
        machine(nccl_settings=tuple(contradictions({"NCCL_BLOCKING_WAIT": "yes"}))),
        "nccl settings",
        Severity.FAIL,
        "NCCL_BLOCKING_WAIT=yes, with which no job with GPUs starts",
    ),
    "unwritable folder": (
        storage("Permission denied"),
        "checkpoints",
        Severity.FAIL,
        "checkpoint.path",
    ),
    "slow disk": (storage(write_s=3.0), "checkpoints", Severity.WARN, "3.0 s"),
    "full disk": (storage(free_bytes=2**20), "disk space", Severity.WARN, "0.0 GiB"),
}


def test_healthy_machine() -> None:
    for facts in (HEALTHY, replace(HEALTHY, torch=ProbeResult(CPU), cluster=None, address="")):
        findings = diagnose(facts)
        assert worst_severity(findings) is Severity.OK
        assert not any(finding.fix for finding in findings)
        assert len(findings) >= 9


@pytest.mark.parametrize(("facts", "name", "level", "text"), PROBLEMS.values(), ids=PROBLEMS)
def test_each_problem_is_one_finding_with_fix(
    facts: SystemFacts, name: str, level: Severity, text: str
) -> None:
    findings = diagnose(facts)
    (problem,) = [finding for finding in findings if finding.level is not Severity.OK]
    assert (problem.name, problem.level) == (name, level)
    assert text in problem.seen + problem.fix
    assert problem.fix
    assert worst_severity(findings) is level
    assert len([line for line in report_lines(findings) if "fix:" in line]) == 1


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"gloo_trouble": "unable to resolve hostname"}, "unable to resolve"),
        ({"gloo": False}, "has no gloo"),
        ({}, "no answer within 90 s"),
    ],
)
def test_gloo_failure(facts: dict[str, Any], text: str) -> None:
    cpu = {key: value for key, value in CPU.items() if key != "gloo_s"}
    findings = diagnose(replace(HEALTHY, torch=ProbeResult(cpu | facts, "no answer within 90 s")))
    (problem,) = [finding for finding in findings if finding.level is Severity.FAIL]
    assert problem.name == "gloo"
    assert text in problem.seen


def test_failure_outweighs_warnings() -> None:
    findings = diagnose(machine(shm_bytes=None, ray=""))
    assert {finding.level for finding in findings} == set(Severity)
    assert worst_severity(findings) is Severity.FAIL


def test_doctor_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit codes: 0 with warnings, 1 with a failure, 2 for an unsupported address."""

    def doctor(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["doctor", *arguments])

    for facts, code in ((HEALTHY, 0), (machine(shm_bytes=None), 0), (machine(ray=""), 1)):
        monkeypatch.setattr(collect, "collect_facts", lambda *_, facts=facts: facts)
        result = doctor("--json")
        assert result.exit_code == code
        report = json.loads(result.stdout)
        assert report["level"] == worst_severity(diagnose(facts))
        result = doctor()
        assert result.exit_code == code
        assert len(result.stdout.splitlines()) == len(report["findings"]) + (
            report["level"] != "ok"
        )
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

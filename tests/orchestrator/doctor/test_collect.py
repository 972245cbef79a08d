"""Doctor probes in real processes, in deliberately broken environments."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rayzero.orchestrator.doctor import collect
from rayzero.orchestrator.doctor.collect import ProbeResult, inspect_machine, run_probe, slowdown
from rayzero.orchestrator.doctor.probes import check_storage
from tests.house.source import ROOT

PROBES = "rayzero.orchestrator.doctor.probes"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is first on the import path of new processes."""
    inherited = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), inherited]))
    return tmp_path


def write(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(text)
    return name


@pytest.mark.parametrize(
    ("ending", "error_text"),
    [
        ("raise RuntimeError('no such file')", "RuntimeError: no such file"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ('print(\'{"trouble": "an error"}\')', "an error"),
        ("import time; time.sleep(600)", "no answer within 3 s"),
        ("", ""),
    ],
)
def test_facts_before_failure_are_kept(modules: Path, ending: str, error_text: str) -> None:
    prints = """
import json, sys
print("output of a library")
print(json.dumps({"a": 2, "b": sys.argv[1]}))
print('{"a": 1}', flush=True)
"""
    name = write(modules, "fails", f"{prints}{ending}\n")
    start_s = time.monotonic()
    probe = run_probe(name, ("x",), 3 if "600" in ending else 120)
    assert probe.facts == {"a": 1, "b": "x"}, "the last value of a key wins"
    assert error_text in probe.error
    assert time.monotonic() - start_s < 120


def test_probe_does_not_wait_for_child_processes(modules: Path) -> None:
    """The child keeps stdout and stderr open, and the last line is incomplete."""
    text = """
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
print('{"a": 1}')
print('{"half":', end="")
"""
    name, pid = write(modules, "leaves", text), modules / "pid"
    with ThreadPoolExecutor(1) as threads:
        pending = threads.submit(run_probe, name, (str(pid),), 240)
        try:
            assert pending.result(120) == ProbeResult({"a": 1}, "")
        finally:  # unblocks `run_probe` if it waits for the child
            os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("ran_ns", "waited_ns", "factor"), [(10**9, 0, 1), (10**9, 3 * 10**9, 4), (10, 10**9, 10)]
)
def test_probes_have_as_many_times_longer_as_this_process_waited_for_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran_ns: int, waited_ns: int, factor: float
) -> None:
    """At a load of 40 the fixed limit was too short for the imports of a probe."""
    file, limits_s = tmp_path / "schedstat", {}
    file.write_text(f"{ran_ns} {waited_ns} 3\n")
    assert slowdown(str(file)) == factor
    assert slowdown(str(tmp_path / "none")) == 1

    def record(module: str, arguments: tuple[str, ...], limit_s: float, *_: str) -> ProbeResult:
        limits_s[module, (*arguments, "")[0]] = limit_s
        return ProbeResult()

    monkeypatch.setattr(collect, "slowdown", lambda: slowdown(str(file)))
    monkeypatch.setattr(collect, "run_probe", record)
    assert collect.collect_facts("runs", "", {}).cluster is None
    assert collect.collect_facts("runs", "127.0.0.1:1", {}).cluster == ProbeResult()
    assert limits_s[PROBES, "cluster"] == limits_s[PROBES, "storage"] == 45 * factor
    assert limits_s["rayzero.engine.torch_probe", "1"] == 90 * factor


def test_torch_import_error_is_reported(modules: Path) -> None:
    write(modules, "torch", "raise ImportError('libcudart.so.13: cannot open shared object file')")
    probe = run_probe("rayzero.engine.torch_probe", ("0", str(modules), "30"), 60)
    assert probe.facts == {}
    assert "libcudart.so.13" in probe.error


def test_unreachable_cluster_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    probe = run_probe(PROBES, ("cluster", f"127.0.0.1:{port}"), 60)
    assert f"127.0.0.1:{port}" in probe.error
    assert "refused" in probe.error.lower()


def test_storage_probe_leaves_no_files_and_reports_a_file_for_a_folder(tmp_path: Path) -> None:
    facts = check_storage(str(tmp_path / "not" / "yet"))
    assert facts["nbytes"] == 4 * 2**20
    assert facts["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").write_text("")
    probe = run_probe(PROBES, ("storage",), 60, str(tmp_path / "runs" / "gpt"))
    assert "Not a directory" in probe.error
    assert probe.facts["fix"]


def test_credentials_in_url_are_redacted() -> None:
    probe = run_probe(PROBES, ("storage",), 60, "ftp://AKIA:p4ss@bucket/runs?region=x")
    assert "***" in probe.error
    assert "p4ss" not in json.dumps([probe.facts, probe.error])


def test_inspect_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = inspect_machine({})
    assert machine.python == platform.python_version()
    assert machine.ray
    assert machine.memfd_error == ""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not inspect_machine({}).stray_token
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("token")
    assert inspect_machine({}).stray_token
    assert not inspect_machine({"RAY_AUTH_MODE": "disabled"}).stray_token

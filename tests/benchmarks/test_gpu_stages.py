"""`python -m benchmarks.gpu`: every stage ends, whatever one of them does, and all that was found
is kept; on a CPU its stages run; and what they do on a GPU runs on a pretended one."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import groups, profiles, runner, transfers
from benchmarks.gpu.child import run_forked
from benchmarks.gpu.report import Report, Settings
from benchmarks.gpu.runner import Run, StageProcess
from benchmarks.gpu.stages import STAGES, Stage
from benchmarks.gpu.table import format_run
from tests.support.processes import PROCESSES

DRY = Settings("cpu", True, 0.0, (), "")


class Forked:
    """A stage's process from the fork server, which has imported torch."""

    def __init__(self, call: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        arguments = call, environment, str(log)
        self._process = PROCESSES.Process(target=run_forked, args=arguments)
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode


def launch(call: dict[str, Any], environment: dict[str, str], log: Path) -> StageProcess:
    return Forked(call, environment, log)


def stage(name: str, *, correctness: bool = False, minutes: float = 1.0) -> Stage:
    return Stage(name, f"it is {name}", f"tests.benchmarks.gpu_stages:{name}", minutes, correctness)


def run_stages(
    stages: list[Stage], path: Path, minutes: float = 10.0, *, stop_at_red: bool = False
) -> tuple[dict[str, Any], list[str]]:
    lines: list[str] = []
    run = Run(path, {"dry_run": True}, lines.append, {"STAGE_SAYS": "hello"}, launch)
    document = run.run(stages, DRY, minutes, stop_at_red=stop_at_red)
    assert json.loads(path.read_text()) == document
    return document, lines


def test_every_stage_ends_and_its_findings_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SHORTEST_S", 0.1)
    monkeypatch.setattr(runner, "EXIT_S", 0.2)
    names = ["raising", "dying", "failing", "skipping", "staying", "hanging", "passing"]
    stages = [stage(name, correctness=name == "failing") for name in names]
    # The one that hangs has 0.2 % of the time that is left.
    stages[5] = stage("hanging", minutes=0.002)
    document, lines = run_stages(stages, tmp_path / "gpu.json")
    found = {result["name"]: result for result in document["stages"]}
    assert {name: result["status"] for name, result in found.items()} == {
        "raising": "error",
        "dying": "error",
        "failing": "failed",
        "skipping": "skipped",
        "staying": "passed",
        "hanging": "timed out",
        "passing": "passed",
    }
    kept = {name: found[name]["values"].get("before") for name in names}
    assert kept == {
        "raising": 1, "hanging": 2, "dying": 3, "staying": 4,
        "failing": None, "skipping": None, "passing": None,
    }  # fmt: skip
    assert found["raising"]["error"] == "ValueError: no such thing"
    assert "in two lines" in found["raising"]["output_tail"]
    assert found["dying"]["error"] == "its process died: SIGABRT"
    assert "killed" in found["hanging"]["error"]
    assert found["staying"]["skipped"][0]["name"] == "exit"
    assert found["skipping"]["stage_skipped"] == "there is none"
    assert found["passing"]["values"]["environment"] == "hello"
    assert lines[0].startswith("[1/7] raising: it is raising (at most ")
    text = format_run(document).splitlines()
    assert text[0] == "NOT CORRECT: failing"
    assert "   failing: two: 3; expected 2" in text
    assert text[1].endswith(": raising, dying, hanging")


def test_interrupted_run_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.signal(signal.SIGTERM, command._interrupt)
    try:
        monkeypatch.setattr(
            Run, "_wait", lambda *arguments: (os.kill(os.getpid(), signal.SIGTERM), 0)[1]
        )
        document, _ = run_stages([stage("hanging"), stage("passing")], tmp_path / "gpu.json")
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert [it["error"] for it in document["stages"]] == ["interrupted", "interrupted"]
    assert document["stages"][1]["status"] == "not run"


def test_dry_run_of_stages_is_green(tmp_path: Path) -> None:
    document, _ = run_stages([stage("sample", correctness=True)], tmp_path / "gpu.json")
    (result,) = document["stages"]
    assert result["status"] == "passed", format_run(document)
    assert len(result["checks"]) > 12
    assert {"python", "join_s", "4K pages: first touch_s"} <= result["values"].keys()
    assert "NOT CORRECT" not in format_run(document)


def test_stages_fill_ten_minutes_and_have_modules() -> None:
    assert sum(stage.minutes for stage in STAGES) == pytest.approx(10.0, abs=0.5)
    for it in STAGES:
        assert Path(*it.module.split(".")).with_suffix(".py").is_file(), it.module


class PretendedGpu(Settings):
    """The stages' code for GPUs, with tensors on the CPU."""

    on_gpu = True


class Moment:
    """An event of a stream on which everything is done at once."""

    def __init__(self, **options: bool) -> None:
        self.record = self.synchronize = lambda *arguments: None
        self.query = lambda: True
        self.elapsed_time = lambda end: 2.0


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    fakes: dict[str, Any] = {
        "device_count": lambda: 1,
        "mem_get_info": lambda: (1 << 30, 2 << 30),
        "synchronize": lambda: None,
        "Stream": lambda: None,
        "stream": lambda stream: nullcontext(),
        "Event": Moment,
        "_sleep": lambda cycles: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return PretendedGpu("cpu", True, 60.0, (), str(tmp_path))


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "report.json", limit_s=60.0)


def failures(report: Report) -> list[dict[str, Any]]:
    return [check for check in report.document["checks"] if not check["passed"]]


def test_transfers_on_a_pretended_gpu(gpu: Settings, report: Report) -> None:
    transfers.run(report, gpu)
    assert not failures(report)
    assert report.document["values"]["products beside the copy, ratio"] == 1.0
    assert "4K pages, registered: host to device_gb_s" in report.document["values"]


def test_abort_of_a_host_read_on_a_pretended_gpu(
    gpu: Settings, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "SMALL_CYCLES", groups.SETTLED)
    with patch.dict(os.environ):  # the group's variables are not for later tests
        groups.run(report, gpu)
    assert not failures(report)
    assert report.document["values"]["abort behind a read: interrupt"] == "no error"


def test_profile_on_a_pretended_gpu(report: Report) -> None:
    cuda = torch.autograd.DeviceType.CUDA
    spans = [("gemm", 0, 4e6), ("ncclKernel", 4e6, 5e6), ("gemm", 7e6, 8e6)]
    events = [
        SimpleNamespace(
            name=name,
            device_type=cuda,
            is_user_annotation=False,
            time_range=SimpleNamespace(start=start, end=end),
        )
        for name, start, end in spans
    ]
    profiles._report_device(report, 3, SimpleNamespace(events=lambda: events))
    values = report.document["values"]
    assert values["stage 3: idle, share"] == pytest.approx(2 / 8)
    assert values["stage 3: exposed communication_ms"] == pytest.approx(1e3 / profiles.STEPS)
    assert values["stage 3, GPU: gemm_ms"]["total"] == pytest.approx(5e3 / profiles.STEPS)

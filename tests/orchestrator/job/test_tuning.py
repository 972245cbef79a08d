"""How autotuning launches its tries, and what it keeps of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rayzero.engine.config.autotuning import AutotuningConfig
from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cli.launch import tune_and_report
from rayzero.orchestrator.cluster.connect import ClusterConnection
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job.tuning import ScriptTuner, apply, find_batch_flag, script_facts
from rayzero.orchestrator.policies.tuning import Candidate, ScriptFacts
from rayzero.orchestrator.spec import JobSpec
from rayzero.orchestrator.spec_sections import LaunchSpec

NOWHERE = ClusterConnection(owned=False, can_grow=False)
SPEC = {"name": "train", "workers": {"min": 1, "max": 2}, "launch": {"script": "train.py"}}


class FakeRuns(ScriptTuner):
    """Answers in place of jobs: stage 0 does not fit, stage 2 is slow, the others are equal."""

    document: ClassVar[dict[str, Any]] = {"autotuning": {"num_tuning_micro_batch_sizes": 2}}

    def _run(
        self, name: str, folder: str, launch: LaunchSpec, *, timed_steps: list[int]
    ) -> dict[str, Any]:
        assert folder == "autotuning_exps"
        Path(folder).mkdir(exist_ok=True)
        if name == "plan":
            assert timed_steps == []
            sizes = {"0": 1, "1": 1, "2": 1}
            told = {"document": self.document, "stage_bytes": sizes, "device_bytes": None}
            return told | {"world_size": 2}
        assert timed_steps == [3, 5]
        stage = launch.overrides["zero_optimization"]["stage"]
        if stage == 0:
            raise JobFailedError("rank 0: OutOfMemoryError: CUDA out of memory. Tried to ...")
        micro_batch = launch.overrides["train_micro_batch_size_per_gpu"]
        measured = {"flops_per_s": None, "peak_bytes": None, "input_shape": [micro_batch, 3]}
        return measured | {"step_s": float(stage), "global_batch": 2 * micro_batch}


@pytest.fixture(autouse=True)
def fake_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rayzero.orchestrator.job.tuning.ScriptTuner", FakeRuns)
    monkeypatch.setattr("rayzero.orchestrator.cluster.connect.connect", lambda address: NOWHERE)
    words = ["rayzero", "launch", "--autotuning", "run", "train.py"]
    monkeypatch.setattr("sys.argv", words)


def test_best_settings_are_written_printed_and_returned(capsys: pytest.CaptureFixture[str]):
    best = tune_and_report(JobSpec.model_validate(SPEC), None, as_json=False)
    assert best is not None
    assert best.launch is not None
    assert best.workers.min == 1  # the tries alone have the largest number
    assert best.launch.timed_steps is None
    assert best.launch.overrides["zero_optimization"] == {"stage": 1}
    config = json.loads(Path("autotuning_results/ds_config_optimal.json").read_text())
    expected = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    assert config == expected
    table = Path("autotuning_results/summary.txt").read_text()
    assert "out of memory" in table
    assert "best" in table
    command = Path("autotuning_results/cmd_optimal.txt").read_text()
    assert command.startswith("rayzero launch --set 'launch.overrides={")
    assert command.endswith(" train.py\n")
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == "z0-mbs1: out of memory"
    assert table in shown


def test_results_are_used_again_without_overwrite(monkeypatch: pytest.MonkeyPatch):
    spec = JobSpec.model_validate(SPEC)
    kept = {"autotuning": {"num_tuning_micro_batch_sizes": 2, "overwrite": False}}
    monkeypatch.setattr(FakeRuns, "document", kept)
    first = FakeRuns(spec, NOWHERE, print).tune()
    run = FakeRuns._run

    def only_plan(self: Any, name: str, *rest: Any, **steps: Any) -> dict[str, Any]:
        assert name == "plan"
        return run(self, name, *rest, **steps)

    monkeypatch.setattr(FakeRuns, "_run", only_plan)
    again = FakeRuns(spec, NOWHERE, print).tune()
    assert [it.candidate for it in again.results] == [it.candidate for it in first.results]
    assert again.best is not None
    assert again.best.candidate == Candidate(1, 2)


def test_script_without_engine_and_short_scripts_are_told(monkeypatch: pytest.MonkeyPatch):
    spec, run = JobSpec.model_validate(SPEC), FakeRuns._run
    monkeypatch.setattr(FakeRuns, "_run", lambda *_, **__: {})
    with pytest.raises(ConfigError, match=r"train\.py builds no engine"):
        FakeRuns(spec, NOWHERE, print).tune()

    def plan_only(self: Any, name: str, *rest: Any, **steps: Any) -> dict[str, Any]:
        return run(self, name, *rest, **steps) if name == "plan" else {}

    monkeypatch.setattr(FakeRuns, "_run", plan_only)
    tuned = FakeRuns(spec, NOWHERE, print).tune()
    assert tuned.best is None
    assert "ends before step 5" in tuned.results[-1].failure


def test_facts_of_the_script():
    told = {"stage_bytes": {"0": 8, "2": 4}, "device_bytes": 10, "world_size": 4}
    fixed = {"train_batch_size": 64, "gradient_accumulation_steps": 2}
    assert script_facts(told | {"document": fixed}, None) == ScriptFacts({0: 8, 2: 4}, 10, 4, 64)
    # With an argument for the batch size the script computes the rest.
    assert script_facts(told | {"document": fixed}, "--b") == ScriptFacts({0: 8, 2: 4}, 10, 8)
    for stage, sizes in ((2, {2: 4}), ([0, 1], {0: 8}), ("all", {0: 8, 2: 4})):
        document = {"zero_optimization": {"stage": stage}, "train_batch_size": "auto"}
        assert script_facts(told | {"document": document}, None) == ScriptFacts(sizes, 10, 4)


def test_batch_sizes_and_arguments_of_a_try():
    candidate, plain = Candidate(3, 8), LaunchSpec(script="t.py", args=["--lr", "1"])
    fixed = apply(candidate, plain, {"train_batch_size": 64}, None)
    assert fixed.args == plain.args
    assert fixed.overrides["gradient_accumulation_steps"] is None
    assert fixed.overrides["train_micro_batch_size_per_gpu"] == 8
    assert "train_batch_size" not in fixed.overrides
    assert apply(candidate, plain, {}, None).overrides["train_batch_size"] is None

    flag = "--per_device_train_batch_size"
    for given, expected in (
        (["--lr", "1", flag, "2", "-v"], ["--lr", "1", flag, "8", "-v"]),
        ([f"{flag}=2", "-v"], ["-v", f"{flag}=8"]),
    ):
        launch = LaunchSpec(script="t.py", args=given)
        assert find_batch_flag(given, AutotuningConfig()) == flag
        mapped = apply(candidate, launch, {}, flag)
        assert mapped.args == expected
        assert "train_micro_batch_size_per_gpu" not in mapped.overrides
    mapping = AutotuningConfig(arg_mappings={"train_micro_batch_size_per_gpu": "--b"})
    assert find_batch_flag(plain.args, mapping) == "--b"
    assert apply(candidate, plain, {}, "--b").args == ["--lr", "1", "--b=8"]
    assert find_batch_flag(plain.args, AutotuningConfig()) is None

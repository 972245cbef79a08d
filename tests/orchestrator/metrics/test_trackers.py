"""A job's run in W&B and MLflow: what their packages are called with, and what these then hold.
Step files, read back with other libraries, and failed writes."""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import Event
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rayzero.engine import trackers as writers
from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import StateEntered
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics import trackers
from rayzero.orchestrator.metrics.trackers import (
    END_LIMIT_S,
    JSON_LINES_FILE,
    TENSORBOARD_FOLDER,
    TensorBoardFile,
    Trackers,
    open_step_files,
    write_json_lines,
)
from rayzero.orchestrator.progress import StepRecord
from tests.orchestrator.support import plan

BEGAN_S = 1_700_000_000.9
LOSSES = [(1, 2.5), (2, 2.25), (3, float("nan")), (2, 2.125), (3, 2.0)]
"""Steps 2 and 3 are done again."""


class FakeWandb(ModuleType):
    """Records what it is called with. `gate`: its `log` waits for this event."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None, origin="wandb/__init__.py")
        self.inits: list[dict[str, Any]] = []
        self.rows: list[dict[str, float]] = []
        self.exit_codes: list[int] = []
        self.axes: list[tuple[str, str | None]] = []
        self.gate = Event()
        self.gate.set()
        self.failures = 0

    def init(self, **settings: Any) -> FakeWandb:
        self.inits.append(settings)
        return self

    def Settings(self, **settings: Any) -> dict[str, Any]:  # noqa: N802
        return settings

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, row: dict[str, float]) -> None:
        self.gate.wait(30)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route to host")
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)

    def teardown(self, exit_code: int) -> None:
        assert exit_code == self.exit_codes[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def run_job(
    folder: Path, state: State = State.SUCCEEDED, end_limit_s: float = END_LIMIT_S, **metrics: Any
) -> list[str]:
    """Emits a job's steps and its end. Returns the warnings."""
    warnings: list[str] = []
    job_plan = plan(folder, metrics=metrics, steps=3, args={"api_key": "hunter2", "depth": 4})
    opened = Trackers(job_plan, BEGAN_S, warnings.append, 0.01, end_limit_s)
    events = EventBus()
    opened.subscribe_to(events)
    for step, loss in LOSSES:
        gauges = {"lr": 0.125, "accuracy": step / 4, "bytes/model_weights": 64.0}
        events.emit(StepRecord(step, 2, 1, loss, 256.0, 0.5, gauges, at_s=BEGAN_S + step))
    events.emit(StateEntered(State.RECOVERING, 1, 2))
    events.emit(StateEntered(state, 1, 2))
    opened.close()
    return warnings


def test_wandb_run_has_every_step_and_how_the_job_ended(tmp_path: Path, wandb: FakeWandb):
    settings = {"project": "gpt", "entity": "team", "mode": "offline"}
    assert run_job(tmp_path, wandb=settings) == []
    (init,) = wandb.inits
    assert settings.items() <= init.items()
    assert (init["id"], init["resume"], init["group"]) == ("job-1700000000", "allow", "job")
    assert (init["config"]["args"]["depth"], init["config"]["args"]["api_key"]) == (4, "***")
    assert ("*", "step") in wandb.axes
    assert [row["step"] for row in wandb.rows] == [1, 2, 3, 2, 3]
    assert wandb.rows[0] == {
        "step": 1,
        "train/loss": 2.5,
        "train/learning_rate": 0.125,
        "user/accuracy": 0.25,
        "speed/step_seconds": 0.5,
        "speed/tokens_per_second": 512.0,
        "job/world_size": 2.0,
        "memory_bytes/model_weights": 64.0,
    }
    run_job(tmp_path, State.FAILED, wandb={})  # as a process that adopts the job
    assert wandb.inits[1]["id"] == init["id"]
    assert wandb.exit_codes == [0, 1]


def test_unreachable_tracker_costs_a_warning_and_is_waited_for_with_a_limit(
    tmp_path: Path, wandb: FakeWandb
):
    wandb.failures = 1
    (warning,) = run_job(tmp_path, wandb={})
    assert warning == "the job's run in W&B cannot be written, retrying: no route to host"
    assert [row["step"] for row in wandb.rows] == [1, 2, 3, 2, 3]
    wandb.gate.clear()  # it is silent
    started_s = time.monotonic()
    (warning,) = run_job(tmp_path, end_limit_s=0.2, wandb={})
    assert time.monotonic() - started_s < 10
    assert warning == "the last values did not reach a tracker within 0.2 s"
    wandb.gate.set()


def test_package_that_cannot_be_imported_is_told_once_and_not_waited_for(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
):
    def fail(name: str) -> None:
        raise AttributeError(f"module {name} has no attribute 'proto'")

    monkeypatch.setattr(trackers, "import_module", fail)
    started_s = time.monotonic()
    (warning,) = run_job(tmp_path, wandb={})
    assert time.monotonic() - started_s < END_LIMIT_S / 2
    assert warning.startswith(
        "W&B does not get this job's steps: its package fails: AttributeError"
    )


@pytest.mark.parametrize(
    ("name", "found"),
    [("wandb", None), ("wandb", SimpleNamespace(origin=None)), ("mlflow", None)],
    ids=["wandb", "a folder that wandb leaves", "mlflow"],
)
def test_missing_package_is_an_error_that_names_the_setting(
    tmp_path: Path, name: str, found: object, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(writers, "find_spec", lambda _: found)
    with pytest.raises(ConfigError, match=rf"metrics\.{name}: the package {name} is not installed"):
        Trackers(plan(tmp_path, metrics={name: {}}), BEGAN_S, print)


def test_mlflow_holds_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    for state in (State.FAILED, State.SUCCEEDED):  # the second one as a process that adopts the job
        assert run_job(tmp_path, state, mlflow={"tracking_uri": uri, "experiment": "gpt"}) == []
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("gpt").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "job")
    assert (run.data.params["args.depth"], run.data.params["args.api_key"]) == ("4", "***")
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    finite = [(step, loss) for step, loss in LOSSES if loss == loss]
    assert [(it.step, it.value) for it in losses] == finite * 2
    assert losses[0].timestamp == int((BEGAN_S + 1) * 1000)
    assert run.data.metrics["user/accuracy"] == 0.75


def test_wandb_package_takes_the_run(tmp_path: Path):
    pytest.importorskip("wandb.sdk", reason="wandb is not installed")
    assert run_job(tmp_path, wandb={"mode": "offline"}) == []
    (file,) = tmp_path.rglob("run-job-1700000000.wandb")
    assert b"train/learning_rate" in file.read_bytes()


# Files

NAN = float("nan")


def step(number: int, loss: float = 1.5, **gauges: float) -> StepRecord:
    return StepRecord(number, 2, 1, loss, 64.0, 0.25, {"lr": 0.5, **gauges}, at_s=1e9 + number)


def test_step_file_has_a_line_per_step_of_all_runs(tmp_path: Path):
    for steps in ((1, 2), (2, 3)):
        records = [step(n, loss=NAN if n == 3 else 1.5, accuracy=0.75) for n in steps]
        write_json_lines(tmp_path / JSON_LINES_FILE, records)
    lines = [json.loads(line) for line in (tmp_path / JSON_LINES_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2, 3]
    assert [line["loss"] for line in lines] == [1.5, 1.5, 1.5, None]
    assert lines[0] == {
        "step": 1,
        "generation": 1,
        "world_size": 2,
        "at_s": 1e9 + 1,
        "loss": 1.5,
        "tokens": 64.0,
        "step_s": 0.25,
        "lr": 0.5,
        "accuracy": 0.75,
    }


def events(folder: Path) -> list:
    """As TensorBoard reads them; it ends at the first record whose checksum is wrong."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    (path,) = (folder / TENSORBOARD_FOLDER).glob("events.out.tfevents.*")
    return [*LegacyEventFileLoader(str(path)).Load()]


def test_event_files_as_tensorboard_reads_them(tmp_path: Path):
    file = TensorBoardFile(tmp_path, now_s=1e9)
    gauges = {"phases/data": 0.125, "bytes/slots": 1e39, "accuracy": 0.75, "samples": 3.0}
    gauges["long" * 50] = 2.0  # its length takes two bytes
    file.write([step(number, **gauges) for number in (1, 300, 2)])
    head, first, second, restart, third = events(tmp_path)
    assert (head.file_version, head.wall_time) == ("brain.Event:2", 1e9)
    assert (first.step, second.step, third.step) == (1, 300, 2)
    assert (restart.step, restart.session_log.status) == (2, 1)  # later events are void
    values = {value.tag: value.simple_value for value in first.summary.value}
    assert values == {
        "train/loss": 1.5,
        "train/learning_rate": 0.5,
        "speed/step_seconds": 0.25,
        "speed/tokens_per_second": 256.0,
        "job/world_size": 2.0,
        "phase_seconds/data": 0.125,
        "memory_bytes/slots": float("inf"),
        "user/accuracy": 0.75,
        "user/" + "long" * 50: 2.0,
    }


def test_failed_write_leaves_no_torn_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same steps are written again later."""
    file = TensorBoardFile(tmp_path, now_s=1e9)
    (path,) = (tmp_path / TENSORBOARD_FOLDER).iterdir()
    file.write([step(1)])
    size = path.stat().st_size
    open_path = Path.open

    @contextmanager
    def open_on_full_disk(self: Path, mode: str) -> Iterator[Any]:
        with open_path(self, mode) as disk:
            disk.write(b"half of a record")
        raise OSError(errno.ENOSPC, "No space left")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_on_full_disk)
        with pytest.raises(OSError, match="No space left"):
            file.write([step(2)])
    assert path.stat().st_size == size
    file.write([step(2)])
    assert [event.step for event in events(tmp_path)] == [0, 1, 2]


def test_failing_step_file_is_retried_and_others_continue(tmp_path: Path):
    warnings: list[str] = []
    writer = BackgroundWriter(warnings.append)
    job_plan = plan(tmp_path, metrics={"jsonl": True, "tensorboard": True})
    queues = open_step_files(job_plan, 1e9, writer)
    path = job_plan.output_dir / JSON_LINES_FILE
    path.unlink()
    path.mkdir()
    for queue in queues:
        queue.put(step(1))
    until_s = time.monotonic() + 10
    while not (warnings and queues[1].is_empty) and time.monotonic() < until_s:
        time.sleep(0.02)
    path.rmdir()
    assert writer.close(10)
    assert len(path.read_text().splitlines()) == 1
    assert [event.step for event in events(job_plan.output_dir)] == [0, 1]
    assert len(warnings) == 1
    assert warnings[0].startswith("metrics.jsonl cannot be written, retrying")

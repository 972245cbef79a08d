"""Step files, read back with other libraries, and failed writes."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.metrics.trackers import (
    JSON_LINES_FILE,
    TENSORBOARD_FOLDER,
    TensorBoardFile,
    open_step_files,
    write_json_lines,
)
from rayzero.orchestrator.progress import StepRecord
from tests.orchestrator.support import plan

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

"""What is written of the steps, read back by others' readers; and that nobody waits for it."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.metrics.step_files import (
    JSON_LINES_FILE,
    TENSORBOARD_FOLDER,
    JsonLinesWriter,
    StepFiles,
    TensorBoardWriter,
)
from rayzero.orchestrator.progress import StepRecord

NAN = float("nan")


def step(number: int, loss: float = 1.5, **gauges: float) -> StepRecord:
    return StepRecord(number, 2, 1, loss, 64.0, 0.25, {"lr": 0.5, **gauges}, at_s=1e9 + number)


class Held:
    """A sink whose disk stands still until it is let go, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go = threading.Event()
        self.written: list[int] = []
        self.closed = False
        self.error = error

    def write(self, records: Sequence[StepRecord]) -> None:
        assert self.go.wait(10)
        if self.error is not None:
            raise self.error
        self.written += [record.step for record in records]

    def close(self) -> None:
        self.closed = True


def test_a_line_a_step_over_several_runs(tmp_path: Path):
    for steps in ((1, 2), (2, 3)):
        lines = JsonLinesWriter(tmp_path)
        lines.write([step(n, loss=NAN if n == 3 else 1.5, accuracy=0.75) for n in steps])
        lines.close()
    found = [json.loads(line) for line in (tmp_path / JSON_LINES_FILE).read_text().splitlines()]
    assert [one["step"] for one in found] == [1, 2, 2, 3]
    assert [one["loss"] for one in found] == [1.5, 1.5, 1.5, None]
    assert found[0] == {
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
    """By tensorboardX's own messages and checksum."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    (path,) = (folder / TENSORBOARD_FOLDER).glob("events.out.tfevents.*")
    data, found = path.read_bytes(), []
    while data:
        length = int.from_bytes(data[:8], "little")
        body = data[12 : 12 + length]
        sums = (data[8:12], data[12 + length : 16 + length])
        for told, of in zip(sums, (data[:8], body), strict=True):
            assert int.from_bytes(told, "little") == masked_crc32c(of)
        found.append(Event.FromString(body))
        data = data[16 + length :]
    return found


def test_event_files_as_tensorboard_reads_them(tmp_path: Path):
    board = TensorBoardWriter(tmp_path, now_s=1e9)
    gauges = {"phases/data": 0.125, "bytes/slots": 1e39, "accuracy": 0.75, "samples": 3.0}
    gauges["long" * 50] = 2.0  # longer than one byte of a length can say
    board.write([step(number, **gauges) for number in (1, 300, 2)])
    board.close()
    head, one, far, again, two = events(tmp_path)
    assert (head.file_version, head.wall_time) == ("brain.Event:2", 1e9)
    assert (one.step, far.step, two.step) == (1, 300, 2)
    assert (again.step, again.session_log.status) == (2, 1)  # what was beyond it is void
    values = {value.tag: value.simple_value for value in one.summary.value}
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


def test_steps_are_in_the_files_though_the_next_ones_never_stop_coming():
    sink = Held()
    sink.go.set()
    writer = BackgroundWriter(print)
    behind = writer.add_queue("the metrics files", StepFiles([sink], print).write, 0.0)
    until_s, number = time.monotonic() + 5, 0
    while not sink.written and time.monotonic() < until_s:
        behind.put(step(number := number + 1))
        time.sleep(0.02)
    written = sink.written
    assert writer.close(10)
    assert 1 in written


@pytest.mark.parametrize(
    "what", [OSError(errno.ENOSPC, "No space left"), ValueError("No space left")]
)
def test_a_file_that_fails_is_told_once_and_the_others_go_on(what: Exception):
    full, good, told = Held(what), Held(), []
    full.go.set()
    good.go.set()
    files = StepFiles([full, good], told.append)
    for number in (1, 2, 3):
        files.write([step(number)])
    files.close()
    assert good.written == [1, 2, 3]
    assert len(told) == 1
    assert "No space left" in told[0]

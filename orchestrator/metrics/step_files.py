"""Metrics.jsonl, TensorBoard, writer thread.

Steps as files in the job's folder: JSON lines, and TensorBoardWriter's event files.

Files written behind the controller: one thread, a bounded queue, and nobody waits.

TensorBoardWriter's event files, written by hand: the libraries that write them bring torch with them.

A file is a row of records: the length as 8 bytes, its checksum, the data, its checksum (masked
CRC-32C, all little-endian). The data are `Event` messages in protobuf's wire format, their fields
numbered as in TensorBoardWriter's event.proto and summary.proto.
"""

from __future__ import annotations

import json
import queue
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

from rayzero.engine.errors import first_line
from rayzero.orchestrator.metrics.catalog import user_gauges
from rayzero.orchestrator.progress import StepRecord

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


_SESSION_START = 1
"""SessionLog.START."""


def frame_record(data: bytes) -> bytes:
    """One record of an event file."""
    length = struct.pack("<Q", len(data))
    return (
        length
        + struct.pack("<I", _masked_crc32c(length))
        + data
        + struct.pack("<I", _masked_crc32c(data))
    )


def version_event(at_s: float) -> bytes:
    """What a file begins with. `at_s` is Unix time, here and below."""
    return _double_field(1, at_s) + _string_field(3, "brain.Event:2")


def scalars_event(at_s: float, step: int, values: Mapping[str, float]) -> bytes:
    """The values of a step, by tag."""
    pairs = (_string_field(1, tag) + _float_field(2, value) for tag, value in values.items())
    summary = b"".join(_bytes_field(1, pair) for pair in pairs)
    return _double_field(1, at_s) + _int_field(2, step) + _bytes_field(5, summary)


def restart_event(at_s: float, step: int) -> bytes:
    """What the file says of this step and later ones up to here no longer holds."""
    return (
        _double_field(1, at_s)
        + _int_field(2, step)
        + _bytes_field(7, _int_field(1, _SESSION_START))
    )


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _field_key(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _int_field(number: int, value: int) -> bytes:
    return _field_key(number, _VARINT) + _varint(value)


def _double_field(number: int, value: float) -> bytes:
    return _field_key(number, _FIXED64) + struct.pack("<d", value)


def _float_field(number: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # larger than a float32 can be
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _field_key(number, _FIXED32) + packed


def _bytes_field(number: int, data: bytes) -> bytes:
    return _field_key(number, _BYTES) + _varint(len(data)) + data


def _string_field(number: int, text: str) -> bytes:
    return _bytes_field(number, text.encode())


def _make_crc_table() -> tuple[int, ...]:
    """CRC-32C (Castagnoli, 1993), reflected, a byte at a time."""
    found = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        found.append(crc)
    return tuple(found)


_CRC_TABLE = _make_crc_table()


def _masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


JSON_LINES_FILE = "metrics.jsonl"


TENSORBOARD_FOLDER = "tensorboard"

_TENSORBOARD_TAGS = {
    "lr": "train/learning_rate",
    "grad_norm": "train/gradient_norm",
    "loss_scale": "train/loss_scale",
    "step_s": "speed/step_seconds",
    "exposed_comm_s": "speed/exposed_communication_seconds",
    "mfu": "speed/model_flops_utilization",
}


_TAG_PREFIXES = {"phases/": "phase_seconds/", "bytes/": "memory_bytes/"}
"""Gauges whose names go on under another folder."""


class JsonLinesWriter:
    """A line a step, `metrics.jsonl`. Later runs go on in the same file; of a step that was done
    again the last line counts. A number that JSON has not, inf or nan, is null."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / JSON_LINES_FILE).open("a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        line = {
            "step": record.step,
            "generation": record.generation,
            "world_size": record.world_size,
            "at_s": record.at_s,
            "loss": record.loss,
            "tokens": record.tokens,
            "step_s": record.step_s,
            **{name: value for name, value in record.gauges.items() if name != "step"},
        }
        self._file.write(
            json.dumps({key: _json_value(value) for key, value in line.items()}) + "\n"
        )

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """Event files under `tensorboard/`, one a run, in the format that TensorBoardWriter reads."""

    def __init__(self, folder: Path, now_s: float) -> None:
        where = folder / TENSORBOARD_FOLDER
        where.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(now_s):010d}.{socket.gethostname()}.{time.time_ns()}"
        self._file = (where / name).open("wb")
        self._last_step = 0
        self._file.write(frame_record(version_event(now_s)))

    def write(self, record: StepRecord) -> None:
        if record.step <= self._last_step:  # what it shows of this step and later ones is void
            self._file.write(frame_record(restart_event(record.at_s, record.step)))
        self._last_step = record.step
        self._file.write(
            frame_record(scalars_event(record.at_s, record.step, _tensorboard_scalars(record)))
        )

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _tensorboard_scalars(record: StepRecord) -> dict[str, float]:
    """By TensorBoardWriter's tags; what the user reported of his own is under `user/`."""
    found = {"speed/step_seconds": record.step_s, "job/world_size": float(record.world_size)}
    if record.loss is not None:
        found["train/loss"] = record.loss
    if record.tokens_per_s is not None:
        found["speed/tokens_per_second"] = record.tokens_per_s
    for name, value in record.gauges.items():
        folder = next((one for one in _TAG_PREFIXES if name.startswith(one)), None)
        if name in _TENSORBOARD_TAGS:
            found[_TENSORBOARD_TAGS[name]] = value
        elif folder is not None:
            found[_TAG_PREFIXES[folder] + name.removeprefix(folder)] = value
    return found | {f"user/{name}": value for name, value in user_gauges(record.gauges)}


def _json_value(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


_MAX_QUEUED_STEPS = 4096


_CLOSE_TIMEOUT_S = 10.0


class StepSink(Protocol):
    """A file of steps. Used by the writer's thread only; may raise what it likes."""

    def write(self, record: StepRecord) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class StepWriter:
    """Owns the thread and the sinks, from its making to `close`.

    What was put is in the files as soon as nothing else is waiting, so that a process that is
    killed loses no step that a checkpoint has. A sink that fails is told once, and left out; steps
    that come faster than they can be written are dropped, and counted.

    Args:
        tell: shows a warning; called in the writer's thread, or in that of `close`.
    """

    def __init__(self, sinks: Sequence[StepSink], tell: Callable[[str], None]) -> None:
        self._sinks = list(sinks)
        self._warn = tell
        self._queue: queue.Queue[StepRecord | None] = queue.Queue(_MAX_QUEUED_STEPS)
        self._dropped = 0
        self._thread = Thread(target=self._run, name="rayzero-steps", daemon=True)
        self._thread.start()

    def enqueue(self, record: StepRecord) -> None:
        """Never waits."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Writes what is waiting, for a while at most, and closes the files."""
        try:
            self._queue.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            self._warn("metrics: the last steps were not written, because the disk is too slow")
            return
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._dropped:
            self._warn(f"metrics: {self._dropped} steps came too fast to be written")

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            self._for_each_sink(lambda sink, record=record: sink.write(record))  # type: ignore[misc]
            if self._queue.empty():
                self._for_each_sink(lambda sink: sink.flush())
        self._for_each_sink(lambda sink: sink.close())

    def _for_each_sink(self, act: Callable[[StepSink], None]) -> None:
        for sink in list(self._sinks):
            try:
                act(sink)
            except Exception as error:  # noqa: BLE001  # whatever it is, the others go on
                self._sinks.remove(sink)
                self._warn(f"metrics: {type(sink).__name__} writes no more: {first_line(error)}")

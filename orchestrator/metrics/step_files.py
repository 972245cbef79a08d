"""Finished steps as files in the job's folder: `metrics.jsonl`, and TensorBoard event files.

The event files are encoded here, because the libraries that write them depend on torch. A file is
a sequence of records: the length as 8 bytes, its checksum, the data, the checksum of the data
(masked CRC-32C, all little-endian). The data are `Event` messages in protobuf's wire format, with
the field numbers of TensorBoard's event.proto and summary.proto.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
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
    """The first event of a file. `at_s` is Unix time, here and below."""
    return _double_field(1, at_s) + _string_field(3, "brain.Event:2")


def scalars_event(at_s: float, step: int, values: Mapping[str, float]) -> bytes:
    """The values of a step, by tag."""
    pairs = (_string_field(1, tag) + _float_field(2, value) for tag, value in values.items())
    summary = b"".join(_bytes_field(1, pair) for pair in pairs)
    return _double_field(1, at_s) + _int_field(2, step) + _bytes_field(5, summary)


def restart_event(at_s: float, step: int) -> bytes:
    """Voids the earlier events of this step and later ones."""
    return (
        _double_field(1, at_s)
        + _int_field(2, step)
        + _bytes_field(7, _int_field(1, _SESSION_START))
    )


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


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
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


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
"""Gauges that are shown under another TensorBoard folder."""


class JsonLinesWriter:
    """`metrics.jsonl`: one line per step. Later runs append to the same file; the last line of a
    step is the valid one. inf and nan, which JSON does not have, are written as null."""

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
    """Event files under `tensorboard/`, one per run."""

    def __init__(self, folder: Path, now_s: float) -> None:
        event_folder = folder / TENSORBOARD_FOLDER
        event_folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(now_s):010d}.{socket.gethostname()}.{time.time_ns()}"
        self._file = (event_folder / name).open("wb")
        self._last_step = 0
        self._file.write(frame_record(version_event(now_s)))

    def write(self, record: StepRecord) -> None:
        if record.step <= self._last_step:  # recomputed after a recovery
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
    """By TensorBoard tag; the metrics of user code are under `user/`."""
    scalars = {"speed/step_seconds": record.step_s, "job/world_size": float(record.world_size)}
    if record.loss is not None:
        scalars["train/loss"] = record.loss
    if record.tokens_per_s is not None:
        scalars["speed/tokens_per_second"] = record.tokens_per_s
    for name, value in record.gauges.items():
        prefix = next((prefix for prefix in _TAG_PREFIXES if name.startswith(prefix)), None)
        if name in _TENSORBOARD_TAGS:
            scalars[_TENSORBOARD_TAGS[name]] = value
        elif prefix is not None:
            scalars[_TAG_PREFIXES[prefix] + name.removeprefix(prefix)] = value
    return scalars | {f"user/{name}": value for name, value in user_gauges(record.gauges)}


def _json_value(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


class StepSink(Protocol):
    """A file of steps. Used by one thread; may raise anything."""

    def write(self, record: StepRecord) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class StepFiles:
    """Writes steps into several sinks. A sink that fails is left out from then on, with a warning.

    Used by the thread of a `BackgroundWriter`. Each batch is flushed, so that a process that is
    killed loses no step that a checkpoint has.
    """

    def __init__(self, sinks: Sequence[StepSink], warn: Callable[[str], None]) -> None:
        self._sinks = list(sinks)
        self._warn = warn

    def write(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self._for_each_sink(lambda sink, record=record: sink.write(record))  # type: ignore[misc]
        self._for_each_sink(lambda sink: sink.flush())

    def close(self) -> None:
        self._for_each_sink(lambda sink: sink.close())

    def _for_each_sink(self, act: Callable[[StepSink], None]) -> None:
        for sink in list(self._sinks):
            try:
                act(sink)
            except Exception as error:  # noqa: BLE001  # the other sinks continue
                self._sinks.remove(sink)
                self._warn(
                    f"metrics: {type(sink).__name__} failed, and writes no further steps: "
                    f"{first_line(error)}"
                )

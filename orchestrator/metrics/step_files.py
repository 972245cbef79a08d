"""Finished steps as files in the job's folder: `metrics.jsonl`, and TensorBoard event files.

The event files are encoded here, because the libraries that write them depend on torch. A file is
a sequence of records: the length as 8 bytes, its checksum, the data, the checksum of the data
(masked CRC-32C, all little-endian). The data are `Event` messages in protobuf's wire format, with
the field numbers of TensorBoard's event.proto and summary.proto.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import copysign, inf
from pathlib import Path

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.background_writer import BackgroundWriter, WriteQueue
from rayzero.orchestrator.metrics.snapshot import finite_json
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.progress import StepRecord

JSON_LINES_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
_TENSORBOARD_TAGS = {
    "lr": "train/learning_rate",
    "grad_norm": "train/gradient_norm",
    "loss_scale": "train/loss_scale",
    "step_s": "speed/step_seconds",
    "exposed_comm_s": "speed/exposed_communication_seconds",
    "mfu": "speed/model_flops_utilization",
    "cpu_cores": "usage/cpu_cores",
    "gpu_utilization": "usage/gpu_utilization",
}
_TAG_PREFIXES = {"phases/": "phase_seconds/", "bytes/": "memory_bytes/"}
"""Gauges that are shown under another TensorBoard folder."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FILE_VERSION, _SUMMARY, _SESSION_LOG = 3, 5, 7
"""Fields of `Event`."""


def encode_event(at_s: float, step: int, field: int, content: bytes) -> bytes:
    """One record of an event file: an `Event` with its wall time, its step and a third field."""
    wall_time = _key(1, _FIXED64) + struct.pack("<d", at_s)
    event = wall_time + _key(2, _VARINT) + _varint(step) + _bytes_field(field, content)
    length = struct.pack("<Q", len(event))
    return length + _checksum(length) + event + _checksum(event)


def encode_summary(values: Mapping[str, float]) -> bytes:
    """A `Summary` of these values by tag."""
    pairs = (_bytes_field(1, tag.encode()) + _float_field(2, x) for tag, x in values.items())
    return b"".join(_bytes_field(1, pair) for pair in pairs)


def _key(number: int, kind: int) -> bytes:
    return bytes([number << 3 | kind])


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _float_field(number: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # larger than a float32 can be
        packed = struct.pack("<f", copysign(inf, value))
    return _key(number, _FIXED32) + packed


def _bytes_field(number: int, data: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(data)) + data


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


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def write_json_lines(path: Path, records: Sequence[StepRecord]) -> None:
    """One line per step. Later runs append to the same file; the last line of a step is the valid
    one. inf and nan, which JSON does not have, are written as null."""
    lines = []
    for record in records:
        fields = {
            "step": record.step,
            "generation": record.generation,
            "world_size": record.world_size,
            "at_s": record.at_s,
            "loss": record.loss,
            "tokens": record.tokens,
            "step_s": record.step_s,
            **{name: value for name, value in record.gauges.items() if name != "step"},
        }
        lines.append(json.dumps(finite_json(fields)) + "\n")
    _append(path, "".join(lines).encode())


class TensorBoardFile:
    """An event file under `tensorboard/`, one per run."""

    def __init__(self, folder: Path, now_s: float) -> None:
        name = f"events.out.tfevents.{int(now_s):010d}.{socket.gethostname()}.{time.time_ns()}"
        self._path = folder / TENSORBOARD_FOLDER / name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step = 0
        _append(self._path, encode_event(now_s, 0, _FILE_VERSION, b"brain.Event:2"))

    def write(self, records: Sequence[StepRecord]) -> None:
        events, last_step = b"", self._last_step
        for record in records:
            at_s, step = record.at_s, record.step
            if step <= last_step:  # recomputed: voids the earlier events from this step on
                start = _key(1, _VARINT) + _varint(1)  # SessionLog.status = START
                events += encode_event(at_s, step, _SESSION_LOG, start)
            last_step = step
            summary = encode_summary(scalars_of(record))
            events += encode_event(at_s, step, _SUMMARY, summary)
        _append(self._path, events)
        self._last_step = last_step


def _append(path: Path, data: bytes) -> None:
    """Appends all of the data or nothing: a torn record would be the last that a reader sees."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(data)
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise


def scalars_of(record: StepRecord) -> dict[str, float]:
    """By TensorBoard tag, which other trackers get too; values of user code are under `user/`."""
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
    return scalars | {f"user/{name}": value for name, value in record.user_gauges()}


def open_step_files(plan: JobPlan, now_s: float, writer: BackgroundWriter) -> list[WriteQueue]:
    """A queue for each of the files that the job file enables. Raises ConfigError if one cannot be
    written."""
    config, folder = plan.spec.metrics, plan.output_dir
    writes: dict[str, Callable[[Sequence[StepRecord]], None]] = {}
    try:
        if config.jsonl:
            writes["metrics.jsonl"] = partial(write_json_lines, folder / JSON_LINES_FILE)
            writes["metrics.jsonl"](())  # creates it
        if config.tensorboard:
            writes["the TensorBoard file"] = TensorBoardFile(folder, now_s).write
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be written into {str(folder)!r}: {error.strerror or error}",
            allowed="a writable folder",
            fix="checkpoint.path, or metrics.jsonl and metrics.tensorboard in the job file",
        ) from None
    return [writer.add_queue(subject, write, 0.0) for subject, write in writes.items()]

"""Steps as files in the job's folder: JSON lines, and TensorBoard's event files."""

from __future__ import annotations

import json
import socket
import time
from math import isfinite
from pathlib import Path
from typing import Any

from rayzero.orchestrator.metrics.event_file import (
    first_event,
    restart_event,
    scalars_event,
)
from rayzero.orchestrator.metrics.event_file import (
    record as framed,
)
from rayzero.orchestrator.metrics.own import own_gauges
from rayzero.orchestrator.progress import StepRecord

JSON_LINES = "metrics.jsonl"
TENSORBOARD = "tensorboard"

_SCALARS = {
    "lr": "train/learning_rate",
    "grad_norm": "train/gradient_norm",
    "loss_scale": "train/loss_scale",
    "step_s": "speed/step_seconds",
    "exposed_comm_s": "speed/exposed_communication_seconds",
    "mfu": "speed/model_flops_utilization",
}
_FOLDERS = {"phases/": "phase_seconds/", "bytes/": "memory_bytes/"}
"""Gauges whose names go on under another folder."""


class JsonLines:
    """A line a step, `metrics.jsonl`. Later runs go on in the same file; of a step that was done
    again the last line counts. A number that JSON has not, inf or nan, is null."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / JSON_LINES).open("a", encoding="utf-8")

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
        self._file.write(json.dumps({key: _held(value) for key, value in line.items()}) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files under `tensorboard/`, one a run, in the format that TensorBoard reads."""

    def __init__(self, folder: Path, now_s: float) -> None:
        where = folder / TENSORBOARD
        where.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(now_s):010d}.{socket.gethostname()}.{time.time_ns()}"
        self._file = (where / name).open("wb")
        self._step = 0
        self._file.write(framed(first_event(now_s)))

    def write(self, record: StepRecord) -> None:
        if record.step <= self._step:  # what it shows of this step and later ones is void
            self._file.write(framed(restart_event(record.at_s, record.step)))
        self._step = record.step
        self._file.write(framed(scalars_event(record.at_s, record.step, _scalars(record))))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _scalars(record: StepRecord) -> dict[str, float]:
    """By TensorBoard's tags; what the user reported of his own is under `user/`."""
    found = {"speed/step_seconds": record.step_s, "job/world_size": float(record.world_size)}
    if record.loss is not None:
        found["train/loss"] = record.loss
    if record.tokens_per_s is not None:
        found["speed/tokens_per_second"] = record.tokens_per_s
    for name, value in record.gauges.items():
        folder = next((one for one in _FOLDERS if name.startswith(one)), None)
        if name in _SCALARS:
            found[_SCALARS[name]] = value
        elif folder is not None:
            found[_FOLDERS[folder] + name.removeprefix(folder)] = value
    return found | {f"user/{name}": value for name, value in own_gauges(record.gauges)}


def _held(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value

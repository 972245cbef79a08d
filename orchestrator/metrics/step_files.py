"""Finished steps as files in the job's folder: `metrics.jsonl`, and TensorBoard event files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rayzero.engine.errors import ConfigError
from rayzero.engine.event_files import EventFile, append_all
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
    append_all(path, "".join(lines).encode())


class TensorBoardFile:
    """An event file under `tensorboard/`, one per run."""

    def __init__(self, folder: Path, now_s: float) -> None:
        self._file = EventFile(folder / TENSORBOARD_FOLDER, now_s)
        self._last_step = 0

    def write(self, records: Sequence[StepRecord]) -> None:
        events, last_step = [], self._last_step
        for record in records:
            if record.step <= last_step:  # recomputed
                events.append(self._file.restart(record.at_s, record.step))
            events.append(self._file.scalars(record.at_s, record.step, scalars_of(record)))
            last_step = record.step
        self._file.write(events)
        self._last_step = last_step


def scalars_of(record: StepRecord) -> dict[str, float]:
    """The values of a step by TensorBoard tag, which other trackers get too; those of user code are
    under `user/`."""
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

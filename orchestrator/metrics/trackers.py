"""Writes finished steps into the job's folder, as `metrics.jsonl` and TensorBoard's event files,
and to the experiment trackers Weights & Biases and MLflow.

Trackers are written in a thread of their own, because the journal must not wait for the network. A
tracker that cannot be reached costs a warning, never a step. A run in a tracker is one run of the
job, including its repairs and adoptions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rayzero.engine.errors import ConfigError, first_line
from rayzero.engine.redact import redact_document
from rayzero.engine.trackers import (
    FAILED,
    EventFile,
    MlflowRun,
    Point,
    WandbRun,
    Writer,
    append_all,
    is_installed,
)
from rayzero.orchestrator.background_writer import BackgroundWriter, WriteQueue
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import StateEntered
from rayzero.orchestrator.job_file import flatten_document, to_document
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.snapshot import finite_json
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.progress import StepRecord

JSON_LINES_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
FLUSH_INTERVAL_S = 2.0
END_LIMIT_S = 20.0
"""How long the end of a job waits for its trackers."""
_RUN_STATUS = {State.SUCCEEDED: "FINISHED", State.STOPPED: "KILLED"}
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
"""Prefixes of gauges, and the TensorBoard prefixes under which they are shown."""


def to_point(record: StepRecord) -> Point:
    """Returns the values of a step by TensorBoard tag; values of user code are under `user/`. Other
    trackers get the same tags."""
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
    scalars |= {f"user/{name}": value for name, value in record.user_gauges()}
    return Point(record.step, record.at_s, scalars)


def write_json_lines(path: Path, records: Sequence[StepRecord]) -> None:
    """Appends one line for each step. Later runs append to the same file; the last line of a step
    is the valid one. inf and nan, which JSON cannot represent, are written as null."""
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
        for record in records:
            if record.step <= self._last_step:  # recomputed, or written again after a failure
                self._file.rewind(record.step, record.at_s)
            self._file.write([to_point(record)])
            self._last_step = record.step


def open_step_files(plan: JobPlan, now_s: float, writer: BackgroundWriter) -> list[WriteQueue]:
    """Opens a queue for each of the files that the job file enables. Raises ConfigError if a file
    cannot be written."""
    config, folder = plan.spec.metrics, plan.output_dir
    writes: dict[str, Callable[[Sequence[StepRecord]], None]] = {}
    try:
        if config.jsonl:
            writes["metrics.jsonl"] = partial(write_json_lines, folder / JSON_LINES_FILE)
            writes["metrics.jsonl"](())  # creates the file
        if config.tensorboard:
            writes["the TensorBoard file"] = TensorBoardFile(folder, now_s).write
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be written into {str(folder)!r}: {error.strerror or error}",
            allowed="a writable folder",
            fix="change checkpoint.path, or metrics.jsonl and metrics.tensorboard in the job file",
        ) from None
    return [writer.add_queue(subject, write, 0.0) for subject, write in writes.items()]


_NAMES = {"wandb": "W&B", "mlflow": "MLflow"}


class Trackers:
    """The trackers that the job file enables. Owns their thread, from `subscribe_to` to `close`.
    Raises ConfigError if a tracker's package is not installed here.

    Args:
        began_s: Unix time of the run's first journal entry, the same after an adoption.
        warn: called in the trackers' thread.
    """

    def __init__(
        self,
        plan: JobPlan,
        began_s: float,
        warn: Callable[[str], None],
        flush_interval_s: float = FLUSH_INTERVAL_S,
        end_limit_s: float = END_LIMIT_S,
    ) -> None:
        self._end_limit_s = end_limit_s
        self._plan = plan
        self._key = f"{plan.spec.name}-{int(began_s)}"
        self._warn = warn
        self._runs: dict[str, Writer | None] = {}  # None if the package cannot be imported
        self._writer = BackgroundWriter(warn)
        packages = [name for name in _NAMES if getattr(plan.spec.metrics, name) is not None]
        for package in packages:
            if not is_installed(package):
                raise ConfigError(
                    f"metrics.{package}: the package {package} is not installed on the "
                    "cluster's head node",
                    allowed=f"a head node with {package}, where the job's controller runs",
                    fix=f"pip install {package} there, or remove metrics.{package}",
                )
        self._queues = [
            self._writer.add_queue(
                f"the job's run in {_NAMES[package]}",
                partial(self._write, package),
                flush_interval_s,
            )
            for package in packages
        ]

    def subscribe_to(self, events: EventBus) -> None:
        if self._queues:
            events.subscribe(self._on_event, (StepRecord, StateEntered))

    def close(self) -> None:
        """Waits until the trackers have all values, for at most `end_limit_s`."""
        if any(queue.failures for queue in self._queues):
            self._warn(
                f"waiting up to {self._end_limit_s:g} s for a tracker to take the last values"
            )
        if not self._writer.close(self._end_limit_s):
            limit = f"{self._end_limit_s:g} s"
            self._warn(f"the last values did not reach a tracker within {limit}")

    def _on_event(self, event: StepRecord | StateEntered) -> None:
        if isinstance(event, StateEntered) and not event.state.is_final:
            return
        for queue in self._queues:
            queue.put(event)

    def _write(self, package: str, events: Sequence[StepRecord | StateEntered]) -> None:
        """Writes steps, and the job's end, to one tracker. May raise anything; then it is called
        again with the same events."""
        if package not in self._runs:
            self._runs[package] = self._open(package)
        if (run := self._runs[package]) is None:
            return
        run.write([to_point(event) for event in events if isinstance(event, StepRecord)])
        for event in events:
            if isinstance(event, StateEntered):
                run.end(_RUN_STATUS.get(event.state, FAILED))

    def _open(self, package: str) -> Writer | None:
        """Opens the job's run in a tracker. Returns None, for good, if the package cannot be
        imported."""
        try:
            module: Any = import_module(package)
        except Exception as error:  # noqa: BLE001 -- a package raises what it wants
            self._warn(
                f"{_NAMES[package]} does not get this job's steps: its package fails: "
                f"{type(error).__name__}: {first_line(error)}"
            )
            return None
        settings = getattr(self._plan.spec.metrics, package)
        name = self._plan.spec.name
        config = redact_document(to_document(self._plan.spec))
        if package == "mlflow":
            params = flatten_document(config)
            return MlflowRun(settings.tracking_uri, settings.experiment, name, self._key, params)
        return WandbRun(
            "step",
            project=settings.project,
            entity=settings.entity,
            group=name,
            name=name,
            id=self._key,
            mode=settings.mode,
            dir=str(self._plan.output_dir),
            config=config,
            settings=module.Settings(console="off", silent=True),
        )

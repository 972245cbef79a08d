"""Writers of the values of steps: TensorBoard, CSV files, W&B, Comet, MLflow.

Used by the monitors of an engine's config (`engine.monitors`) and by a job
(`orchestrator.metrics.trackers`). This module does not import torch.
"""

from __future__ import annotations

import csv
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, Protocol

FAILED = "FAILED"
"""A run's status at its end, as MLflow names it; others are FINISHED and KILLED."""
MAX_MLFLOW_BATCH = 500
"""The most metrics in a request; MLflow's limit is 1000, of which 100 may be params."""
_MAX_PARAM_CHARACTERS = 500
_MLFLOW_INVALID = re.compile(r"[^\w\-. /:]")


def is_installed(package: str) -> bool:
    """Returns whether a package is installed. A mere folder of that name, as wandb leaves in a
    project, is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


class Point(NamedTuple):
    """The values of a step by name; `at_s`: Unix time."""

    step: int
    at_s: float
    values: Mapping[str, float]


class Writer(Protocol):
    """A destination of values. Its methods may raise anything; then they may be called again with
    the same arguments."""

    def rewind(self, step: int, at_s: float) -> None:
        """Prepares to write values of `step` and later steps: removes values of these steps that
        were written before, if the destination can."""
        return

    def write(self, points: Sequence[Point]) -> None:
        """Writes values, durably as far as the destination allows."""

    def end(self, status: str) -> None:
        """Marks the run as ended; without this call, the run ends with the process."""
        return


class CsvFiles(Writer):
    """A file for each name, which is opened for each write, as in DeepSpeed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def rewind(self, step: int, at_s: float) -> None:
        for file in self._folder.glob("*.csv"):
            with file.open(newline="") as opened:
                header, *rows = [*csv.reader(opened)] or [[]]
            kept = [row for row in rows if len(row) == 2 and int(row[0]) < step]
            if header and len(kept) < len(rows):
                temporary = file.with_suffix(".tmp")
                with temporary.open("w", newline="") as opened:
                    csv.writer(opened).writerows([header, *kept])
                os.replace(temporary, file)

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.values.items():
                file = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
                with file.open("a", newline="") as opened:
                    if not opened.tell():
                        csv.writer(opened).writerow(["step", name.rpartition("/")[2]])
                    csv.writer(opened).writerow([point.step, value])


class EventFile(Writer):
    """A new TensorBoard event file in a folder, made with TensorBoard's own messages and records.
    After a rewind, TensorBoard hides the earlier values.

    The writers of TensorBoard and torch have a thread that ends with the first write that fails.
    This file is complete after each call, and a write that raises can be repeated.
    """

    def __init__(self, folder: Path, now_s: float) -> None:
        # Imported here: TensorBoard takes half a second, and few processes write such files.
        self._records = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        self._event = import_module("tensorboard.compat.proto.event_pb2").Event
        name = f"events.out.tfevents.{int(now_s):010d}.{socket.gethostname()}.{time.time_ns()}"
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / name
        self._append([self._event(wall_time=now_s, file_version="brain.Event:2")])

    def rewind(self, step: int, at_s: float) -> None:
        self._append([self._event(wall_time=at_s, step=step, session_log={"status": "START"})])

    def write(self, points: Sequence[Point]) -> None:
        events = []
        for step, at_s, values in points:
            pairs = [{"tag": tag, "simple_value": value} for tag, value in values.items()]
            events.append(self._event(wall_time=at_s, step=step, summary={"value": pairs}))
        self._append(events)

    def _append(self, events: Sequence[Any]) -> None:
        data = BytesIO()
        records = self._records(data)
        for event in events:
            records.write(event.SerializeToString())
        append_all(self._path, data.getvalue())


class WandbRun(Writer):
    """A run in Weights & Biases: opened or continued, or without `axis` the process's active run.

    Args:
        axis: the column for the step. None: W&B's own step, which must not go back: values of
            steps that are done again are dropped.
        settings: arguments of `wandb.init`.
    """

    def __init__(self, axis: str | None = None, **settings: Any) -> None:
        self._wandb: Any = import_module("wandb")
        active = self._wandb.run if axis is None else None
        self.run = active or self._wandb.init(resume="allow", **settings)
        self._axis = axis
        if axis is not None:
            self.run.define_metric(axis)
            self.run.define_metric("*", step_metric=axis)

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            if self._axis is None:
                self.run.log(point.values, step=point.step)
            else:
                self.run.log({self._axis: point.step, **point.values})

    def end(self, status: str) -> None:
        exit_code = int(status == FAILED)
        self.run.finish(exit_code=exit_code)
        self._wandb.teardown(exit_code=exit_code)  # its service process


class CometExperiment(Writer):
    """An experiment in Comet, which gets a value of each name every `interval` steps."""

    def __init__(self, interval: int, name: str | None, **settings: Any) -> None:
        self.experiment = import_module("comet_ml").start(**settings)
        if name is not None:
            self.experiment.set_name(name)
        self._interval = interval
        self._last: dict[str, int] = {}

    def rewind(self, step: int, at_s: float) -> None:
        self._last.clear()

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.values.items():
                if name not in self._last or point.step - self._last[name] >= self._interval:
                    self._last[name] = point.step
                    self.experiment.log_metric(name, value, step=point.step)


class MlflowRun(Writer):
    """A run in MLflow.

    Args:
        key: a tag, by which the run is found and continued.
        params: the run's parameters, of which empty ones are left out.
    """

    def __init__(
        self,
        uri: str | None,
        experiment: str,
        name: str,
        key: str,
        params: Iterable[tuple[str, Any]],
    ) -> None:
        self._entities: Any = import_module("mlflow").entities
        self._client = client = import_module("mlflow").MlflowClient(uri)
        found = client.get_experiment_by_name(experiment)
        folder = client.create_experiment(experiment) if found is None else found.experiment_id
        if earlier := client.search_runs([folder], f"tags.`rayzero.run` = '{key}'"):
            self._run_id = earlier[0].info.run_id
            client.update_run(self._run_id, "RUNNING")
            return
        tags = {"rayzero.run": key, "rayzero.job": name}
        self._run_id = client.create_run(folder, tags=tags, run_name=name).info.run_id
        entries = [
            self._entities.Param(_MLFLOW_INVALID.sub("_", key), str(value)[:_MAX_PARAM_CHARACTERS])
            for key, value in params
            if value not in ([], "")
        ]
        client.log_batch(self._run_id, params=entries[:100])

    def write(self, points: Sequence[Point]) -> None:
        metrics = [
            self._entities.Metric(
                _MLFLOW_INVALID.sub("_", name), value, int(point.at_s * 1000), point.step
            )
            for point in points
            for name, value in point.values.items()
            if isfinite(value)  # MLflow's stores treat other values differently
        ]
        for start in range(0, len(metrics), MAX_MLFLOW_BATCH):
            batch = metrics[start : start + MAX_MLFLOW_BATCH]
            self._client.log_batch(self._run_id, metrics=batch, synchronous=True)

    def end(self, status: str) -> None:
        self._client.set_terminated(self._run_id, status)


def append_all(path: Path, data: bytes, *, create: bool = True) -> None:
    """Appends all of the data or nothing, since readers stop at a torn record. Raises OSError if
    the file cannot be written or, without `create`, does not exist."""
    size = path.stat().st_size if not create or path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(data)
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise

"""Monitors of DeepSpeed's config: rank 0 writes loss, learning rate and loss scale of each step.

Names are DeepSpeed's, the step is the number of samples so far. Values are those that the step's
vote read anyway. A run that continues, after a repair or from a checkpoint, keeps the same files,
W&B run or Comet experiment; values of steps that are done again replace the earlier ones, as far
as the service allows it: W&B keeps the earlier ones, Comet shows both.
"""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import time
from typing import Any, Protocol

from rayzero.engine.config import EngineConfig
from rayzero.engine.config.monitors import (
    CometConfig,
    CsvMonitorConfig,
    TensorBoardConfig,
    WandbConfig,
)
from rayzero.engine.errors import ConfigError, first_line
from rayzero.engine.event_files import EventFile

log = logging.getLogger("rayzero.engine")

Event = tuple[str, float, int]
"""(name, value, samples so far)"""

_PACKAGES = {"wandb": "wandb", "comet": "comet_ml"}


class MonitorWriter(Protocol):
    """One destination. Holds nothing that would have to be closed: files are opened for each write,
    and the run of a service, which may be the script's own, ends with the process."""

    def rewind(self, samples: int) -> None:
        """Values of these samples or more are going to be written; earlier writes of them are
        removed, unless the destination keeps them."""
        return

    def write(self, events: Sequence[Event]) -> None:
        """Writes values, durably as far as the destination allows."""


def check_packages(config: EngineConfig) -> None:
    """Raises ConfigError if the package of a monitor is not installed; on every rank, since each
    may become rank 0."""
    for section, package in _PACKAGES.items():
        if getattr(config, section).enabled and not is_installed(package):
            raise ConfigError(
                f"{section}.enabled: the package {package} is not installed",
                fix=f"pip install {package}, or {section}.enabled: false",
            )


def is_installed(package: str) -> bool:
    """Not if it is only a folder of that name, as wandb leaves in a project."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


class CsvWriter(MonitorWriter):
    """A file for each name, which is opened for each write, as in DeepSpeed."""

    def __init__(self, config: CsvMonitorConfig) -> None:
        self._folder = Path(config.output_path) / config.job_name
        self._folder.mkdir(parents=True, exist_ok=True)

    def rewind(self, samples: int) -> None:
        for file in self._folder.glob("*.csv"):
            with file.open(newline="") as opened:
                header, *rows = [*csv.reader(opened)] or [[]]
            kept = [row for row in rows if len(row) == 2 and int(row[0]) < samples]
            if header and len(kept) < len(rows):
                temporary = file.with_suffix(".tmp")
                with temporary.open("w", newline="") as opened:
                    csv.writer(opened).writerows([header, *kept])
                os.replace(temporary, file)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            file = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with file.open("a", newline="") as opened:
                if not opened.tell():
                    csv.writer(opened).writerow(["step", name.rpartition("/")[2]])
                csv.writer(opened).writerow([samples, value])


class TensorBoardWriter(MonitorWriter):
    """An event file; TensorBoard hides the earlier values of steps that are done again."""

    def __init__(self, config: TensorBoardConfig) -> None:
        self._file = EventFile(Path(config.output_path) / config.job_name, time())

    def rewind(self, samples: int) -> None:
        self._file.write([self._file.restart(time(), samples)])

    def write(self, events: Sequence[Event]) -> None:
        self._file.write(
            [self._file.scalars(time(), step, {name: value}) for name, value, step in events]
        )


class WandbWriter(MonitorWriter):
    """The active run, or a new one; W&B drops values of steps that it has."""

    def __init__(self, config: WandbConfig, runs: dict[str, str]) -> None:
        wandb: Any = import_module("wandb")
        self._run = wandb.run or wandb.init(
            project=config.project,
            group=config.group,
            entity=config.team,
            id=runs.get("wandb"),
            resume="allow",
        )
        runs["wandb"] = str(self._run.id)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self._run.log({name: value}, step=samples)


class CometWriter(MonitorWriter):
    """An experiment, which gets a value of each name every `samples_log_interval` samples."""

    def __init__(self, config: CometConfig, runs: dict[str, str]) -> None:
        comet: Any = import_module("comet_ml")
        self._experiment = comet.start(
            api_key=config.api_key,
            project=config.project,
            workspace=config.workspace,
            experiment_key=runs.get("comet") or config.experiment_key,
            mode="get_or_create" if "comet" in runs else config.mode,
            online=config.online,
        )
        if config.experiment_name is not None:
            self._experiment.set_name(config.experiment_name)
        runs["comet"] = str(self._experiment.get_key())
        self._interval = config.samples_log_interval
        self._last: dict[str, int] = {}

    def rewind(self, samples: int) -> None:
        self._last.clear()

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            if name not in self._last or samples - self._last[name] >= self._interval:
                self._last[name] = samples
                self._experiment.log_metric(name, value, step=samples)


class Monitors:
    """The monitors of an engine; without writers on ranks other than 0. `write_events` and
    `enabled` are DeepSpeed's. Used by the training thread.

    `openers` are called before the first write: by then a state that the script loads has set
    which run to continue.

    Attributes:
        rank: that they were made for.
    """

    def __init__(self, openers: Sequence[Callable[[], MonitorWriter]], rank: int) -> None:
        self.rank = rank
        self._openers = list(openers)
        self._writers: list[MonitorWriter] = []
        self._last: int | None = None  # samples of the newest step; None before the first

    @property
    def enabled(self) -> bool:
        return bool(self._writers or self._openers)

    def write_step(self, samples: int, loss: float, lr: float, loss_scale: float | None) -> None:
        """Writes a finished step's values; `loss_scale` is None where there is none."""
        if not self.enabled:
            return
        values = {"train_loss": loss, "lr": lr, "loss_scale": loss_scale}
        if self._last is None or samples <= self._last:
            self._begin_at(samples)
        self._last = samples
        self.write_events(
            [(f"Train/Samples/{key}", it, samples) for key, it in values.items() if it is not None]
        )

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Writes (name, value, step) of a script."""
        if self._last is None and event_list:
            self._last = event_list[0][2]
            self._begin_at(self._last)
        for writer in list(self._writers):
            self._try(writer, partial(writer.write, event_list))

    def close(self) -> None:
        """Nothing is written any more."""
        self._writers.clear()
        self._openers.clear()

    def _begin_at(self, samples: int) -> None:
        openers, self._openers = self._openers, []
        for opener in openers:
            self._try(opener, partial(self._open, opener))
        for writer in list(self._writers):
            self._try(writer, partial(writer.rewind, samples))

    def _open(self, opener: Callable[[], MonitorWriter]) -> None:
        self._writers.append(opener())

    def _try(self, writer: object, call: Callable[[], None]) -> None:
        """A monitor that fails is left out from then on: training does not depend on it."""
        try:
            call()
        except Exception as error:  # noqa: BLE001  a service's client raises what it wants
            self._writers = [other for other in self._writers if other is not writer]
            log.error("a monitor failed, and is not used any more: %s", first_line(error))


def make_monitors(config: EngineConfig, runs: dict[str, str], rank: int) -> Monitors:
    """The monitors that a config enables, on rank 0. `runs`, part of the training state, has the
    identifiers of the services' runs, and gets those of new ones."""
    openers: list[tuple[bool, Callable[[], MonitorWriter]]] = [
        (config.tensorboard.enabled, partial(TensorBoardWriter, config.tensorboard)),
        (config.csv_monitor.enabled, partial(CsvWriter, config.csv_monitor)),
        (config.wandb.enabled, partial(WandbWriter, config.wandb, runs)),
        (config.comet.enabled, partial(CometWriter, config.comet, runs)),
    ]
    return Monitors([opener for enabled, opener in openers if enabled and rank == 0], rank)

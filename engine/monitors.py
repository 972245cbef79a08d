"""Monitors of DeepSpeed's config: rank 0 writes loss, learning rate and loss scale of each step.

Names are DeepSpeed's; the step of a value is the number of samples so far. The step's vote has read
the values anyway. A run that continues, after a repair or from a checkpoint, keeps the same files,
W&B run or Comet experiment. Values of steps that are done again replace the earlier values where
the service allows that: W&B keeps the earlier values, Comet shows both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from time import time

from rayzero.engine.config import EngineConfig
from rayzero.engine.config.monitors import CometConfig, WandbConfig
from rayzero.engine.errors import ConfigError, first_line
from rayzero.engine.trackers import (
    CometExperiment,
    CsvFiles,
    EventFile,
    Point,
    WandbRun,
    Writer,
    is_installed,
)

log = logging.getLogger("rayzero.engine")

Event = tuple[str, float, int]
"""(name, value, samples so far)"""

_PACKAGES = {"wandb": "wandb", "comet": "comet_ml"}


def check_packages(config: EngineConfig) -> None:
    """Raises ConfigError if the package of a monitor is not installed; on every rank, since each
    may become rank 0."""
    for section, package in _PACKAGES.items():
        if getattr(config, section).enabled and not is_installed(package):
            raise ConfigError(
                f"{section}.enabled: the package {package} is not installed",
                fix=f"pip install {package}, or {section}.enabled: false",
            )


class Monitors:
    """The monitors of an engine; only rank 0 has writers. `write_events` and `enabled` are names of
    DeepSpeed's. Used by the training thread. No writer has to be closed: files are opened for each
    write, and the run of a service, which may be the script's own, ends with the process.

    `openers` are called before the first write. By then, a state that the script loads has set
    which run to continue.

    Attributes:
        rank: the rank for which the monitors were made.
    """

    def __init__(self, openers: Sequence[Callable[[], Writer]], rank: int) -> None:
        self.rank = rank
        self._openers = list(openers)
        self._writers: dict[Callable[[], Writer], Writer] = {}
        self._last: int | None = None  # samples of the newest step; None before the first

    @property
    def enabled(self) -> bool:
        return bool(self._openers)

    def write_step(self, samples: int, loss: float, lr: float, loss_scale: float | None) -> None:
        """Writes a finished step's values; `loss_scale` is None where there is none."""
        values = {"train_loss": loss, "lr": lr, "loss_scale": loss_scale}
        if self._last is None or samples <= self._last:
            self._each(lambda writer: writer.rewind(samples, time()))
        self._last = samples
        known = {key: value for key, value in values.items() if value is not None}
        self.write_events([(f"Train/Samples/{key}", known[key], samples) for key in known])

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Writes values, those of a script included."""
        points = [  # the events of a step together
            Point(samples, time(), {name: value for name, value, _ in group})
            for samples, group in groupby(event_list, key=itemgetter(2))
        ]
        if self._last is None and points:
            self._last = first = points[0].step
            self._each(lambda writer: writer.rewind(first, time()))
        self._each(lambda writer: writer.write(points))

    def close(self) -> None:
        """Ends all writing."""
        self._openers.clear()

    def _each(self, call: Callable[[Writer], None]) -> None:
        """Calls `call` with every writer. A monitor that fails is left out from then on, because
        training does not depend on it."""
        for opener in list(self._openers):
            try:
                if opener not in self._writers:
                    self._writers[opener] = opener()
                call(self._writers[opener])
            except Exception as error:  # noqa: BLE001  a service's client may raise anything
                self._openers.remove(opener)
                log.error("a monitor failed, and is not used any more: %s", first_line(error))


def _open_wandb(config: WandbConfig, runs: dict[str, str]) -> Writer:
    run = WandbRun(
        project=config.project, group=config.group, entity=config.team, id=runs.get("wandb")
    )
    runs["wandb"] = str(run.run.id)
    return run


def _open_comet(config: CometConfig, runs: dict[str, str]) -> Writer:
    comet = CometExperiment(
        config.samples_log_interval,
        config.experiment_name,
        api_key=config.api_key,
        project=config.project,
        workspace=config.workspace,
        experiment_key=runs.get("comet") or config.experiment_key,
        mode="get_or_create" if "comet" in runs else config.mode,
        online=config.online,
    )
    runs["comet"] = str(comet.experiment.get_key())
    return comet


def make_monitors(config: EngineConfig, runs: dict[str, str], rank: int) -> Monitors:
    """Returns the monitors that a config enables, without writers on other ranks than 0. `runs`,
    part of the training state, has the identifiers of the services' runs, and gets those of new
    runs."""
    board, table = config.tensorboard, config.csv_monitor
    openers: list[tuple[bool, Callable[[], Writer]]] = [
        (board.enabled, lambda: EventFile(Path(board.output_path) / board.job_name, time())),
        (table.enabled, partial(CsvFiles, Path(table.output_path) / table.job_name)),
        (config.wandb.enabled, partial(_open_wandb, config.wandb, runs)),
        (config.comet.enabled, partial(_open_comet, config.comet, runs)),
    ]
    return Monitors([opener for enabled, opener in openers if enabled and rank == 0], rank)

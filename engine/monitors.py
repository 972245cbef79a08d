"""Monitors of DeepSpeed's config: rank 0 writes loss, learning rate and loss scale of each step.

Names are DeepSpeed's, the step is the number of samples so far. Values are those that the step's
vote read anyway. A run that continues, after a repair or from a checkpoint, keeps the same files,
W&B run or Comet experiment; values of steps that are done again replace the earlier ones, as far
as the service allows it: W&B keeps the earlier ones, Comet shows both.
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
    """The monitors of an engine; without writers on ranks other than 0. `write_events` and
    `enabled` are DeepSpeed's. Used by the training thread. Nothing has to be closed: files are
    opened for each write, and the run of a service, which may be the script's own, ends with the
    process.

    `openers` are called before the first write: by then a state that the script loads has set
    which run to continue.

    Attributes:
        rank: that they were made for.
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
        self.write_events(
            [(f"Train/Samples/{key}", it, samples) for key, it in values.items() if it is not None]
        )

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Writes (name, value, step) of a script."""
        points = [  # the events of a step together
            Point(samples, time(), {name: value for name, value, _ in group})
            for samples, group in groupby(event_list, key=itemgetter(2))
        ]
        if self._last is None and points:
            self._last = first = points[0].step
            self._each(lambda writer: writer.rewind(first, time()))
        self._each(lambda writer: writer.write(points))

    def close(self) -> None:
        """Nothing is written any more."""
        self._openers.clear()

    def _each(self, call: Callable[[Writer], None]) -> None:
        """A monitor that fails is left out from then on: training does not depend on it."""
        for opener in list(self._openers):
            try:
                if opener not in self._writers:
                    self._writers[opener] = opener()
                call(self._writers[opener])
            except Exception as error:  # noqa: BLE001  a service's client raises what it wants
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
    """The monitors that a config enables, on rank 0. `runs`, part of the training state, has the
    identifiers of the services' runs, and gets those of new ones."""
    board, table = config.tensorboard, config.csv_monitor
    openers: list[tuple[bool, Callable[[], Writer]]] = [
        (board.enabled, lambda: EventFile(Path(board.output_path) / board.job_name, time())),
        (table.enabled, partial(CsvFiles, Path(table.output_path) / table.job_name)),
        (config.wandb.enabled, partial(_open_wandb, config.wandb, runs)),
        (config.comet.enabled, partial(_open_comet, config.comet, runs)),
    ]
    return Monitors([opener for enabled, opener in openers if enabled and rank == 0], rank)

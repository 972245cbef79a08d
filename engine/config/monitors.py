"""Sections of the monitors, to which rank 0 writes loss, learning rate and loss scale of a step."""

from __future__ import annotations

from typing import Literal

from rayzero.engine.config.fields import ConfigSection, NonNegativeInt, StrictModel
from rayzero.engine.config.keys import implemented

_JOB_NAME = "DeepSpeedJobName"


class TensorBoardConfig(ConfigSection):
    """TensorBoard's event files."""

    enabled: bool = implemented(
        False,
        "loss, learning rate and loss scale are written to TensorBoard's event files",
        group="monitors and profilers",
    )
    output_path: str = implemented("", "folder of the event files; by default the current folder")
    job_name: str = implemented(_JOB_NAME, "subfolder of output_path")


class CsvMonitorConfig(ConfigSection):
    """One CSV file for each value."""

    enabled: bool = implemented(False, "the same values are written to CSV files")
    output_path: str = implemented("", "folder of the CSV files; by default the current folder")
    job_name: str = implemented(_JOB_NAME, "subfolder of output_path")


class WandbConfig(ConfigSection):
    """A run of Weights & Biases."""

    enabled: bool = implemented(
        False, "the same values are sent to Weights & Biases; requires the package wandb"
    )
    group: str | None = implemented(None, "the run's group")
    team: str | None = implemented(None, "the run's team (entity)")
    project: str = implemented("deepspeed", "the run's project")


class CometConfig(ConfigSection):
    """An experiment of Comet; a key that is None is left to Comet's own settings."""

    enabled: bool = implemented(
        False, "the same values are sent to Comet; requires the package comet_ml"
    )
    samples_log_interval: NonNegativeInt = implemented(
        100, "samples between two values that are sent"
    )
    project: str | None = implemented(None, "the project's name")
    workspace: str | None = implemented(None, "the workspace's name")
    api_key: str | None = implemented(None, "the API key")
    experiment_name: str | None = implemented(None, "the experiment's name")
    experiment_key: str | None = implemented(None, "the experiment's key, to continue one")
    online: bool | None = implemented(None, "false: the experiment is stored locally")
    mode: Literal["get", "create", "get_or_create"] | None = implemented(
        None, "whether an experiment is continued (get), created, or continued if it exists"
    )


class MonitorConfig(StrictModel):
    """The sections of all monitors, under the names of DeepSpeed's config object."""

    tensorboard: TensorBoardConfig = TensorBoardConfig()
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    wandb: WandbConfig = WandbConfig()
    comet: CometConfig = CometConfig()

    @property
    def enabled(self) -> bool:
        """Whether any monitor is enabled."""
        return any(getattr(self, name).enabled for name in type(self).model_fields)

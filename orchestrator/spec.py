"""The job file, as a model: what may stand in it, in which units, and with which defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

_ENTRYPOINT = re.compile(r"[\w.]+:[\w.<>]+")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Workers(_Section):
    """How many workers, and what each of them needs."""

    min: int = Field(default=1, ge=1, description="workers the job cannot go below")
    max: int | None = Field(
        default=None, ge=1, description="workers the job can make use of; by default as many as min"
    )
    cpus: float = Field(default=1, gt=0, description="CPUs of a worker, and its compute threads")
    gpus: float = Field(default=0, ge=0, le=1, description="GPUs of a worker: 0 or 1")
    start_timeout_s: float = Field(
        default=300, gt=0, description="seconds to wait for the resources of `min` workers"
    )

    @field_validator("max")
    @classmethod
    def _not_below_min(cls, value: int | None, info: ValidationInfo) -> int | None:
        least = info.data.get("min", 1)
        if value is not None and value < least:
            raise ValueError(f"must not be less than workers.min, which is {least}")
        return value

    @property
    def most(self) -> int:
        return self.min if self.max is None else self.max


class Checkpoint(_Section):
    """Where the job's files go, and how often its state does."""

    path: str = Field(
        default="runs",
        min_length=1,
        description="folder for the job's output, relative to the working directory; "
        "the job's own folder in it has the job's name",
    )
    every_steps: int | None = Field(default=None, ge=1, description="steps between checkpoints")
    keep: int = Field(default=3, ge=1, description="checkpoints kept")

    @field_validator("path")
    @classmethod
    def _local(cls, value: str) -> str:
        if "://" in value:
            raise ValueError("object storage is not in this version: give a local or shared folder")
        return value


class Recovery(_Section):
    """What happens when something breaks."""

    replicas: int = Field(default=0, ge=0, description="copies of each shard in other memories")
    hang_timeout_s: float = Field(
        default=120, gt=0, description="seconds a rank may wait for its peers in a collective"
    )
    max_faults: int = Field(default=20, ge=0, description="hardware faults allowed in the window")
    fault_window_s: float = Field(default=3600, gt=0, description="seconds of the fault window")


class Metrics(_Section):
    """The Prometheus endpoint."""

    port: int | None = Field(default=None, ge=1, le=65535, description="port of /metrics")


class JobSpec(_Section):
    """A whole job file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=63)] = Field(
        description="letters, digits, '.', '_' and '-'; the job's output folder is called so"
    )
    entrypoint: str = Field(description="module:function, imported on the workers")
    args: dict[str, Any] = Field(default_factory=dict, description="handed over as ctx.args")
    engine: str | dict[str, Any] | None = Field(
        default=None,
        description="a DeepSpeed config file, relative to the job file, or the same inline",
    )
    workers: Workers = Workers()
    steps: int | None = Field(default=None, ge=1, description="optimizer steps, as ctx.steps")
    seed: int = Field(default=0, ge=0, description="the data order follows from it")
    checkpoint: Checkpoint = Checkpoint()
    recovery: Recovery = Recovery()
    metrics: Metrics = Metrics()

    @field_validator("entrypoint")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        if not _ENTRYPOINT.fullmatch(value):
            raise ValueError("must be module:function, such as examples.gpt.train:train")
        return value


_LATER = {
    ("checkpoint", "every_steps"): "no checkpoint is written while the job runs",
    ("checkpoint", "keep"): "no checkpoint is written while the job runs",
    ("recovery", "replicas"): "no shard is copied, and a lost worker ends the job",
    ("recovery", "max_faults"): "a lost worker ends the job",
    ("recovery", "fault_window_s"): "a lost worker ends the job",
    ("metrics", "port"): "no endpoint is opened",
}


def not_in_this_version(spec: JobSpec) -> Iterator[str]:
    """One line for each key the user set whose feature is still to come.

    Such a key is accepted, so that a job file can be written for the versions to come, but the
    user is told what it does now.
    """
    for (section, key), now in _LATER.items():
        part: BaseModel = getattr(spec, section)
        value = getattr(part, key)
        if key in part.model_fields_set and value not in (None, 0):
            yield f"{section}.{key}: {value} is not in this version: {now}"
    if spec.workers.most > spec.workers.min:
        yield (
            f"workers.max: {spec.workers.max} is not in this version while the job runs: the "
            "number of workers is chosen at the start and stays"
        )

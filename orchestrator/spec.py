"""The job file, as a model: what may stand in it, in which units, and with which defaults."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rayzero.engine.validation import error_lines, raise_config_error

SCHEMES = ("file", "s3", "gs", "gcs", "hdfs")
"""What the URL of a checkpoint folder may begin with."""

_SCHEMES = ", ".join(f"{scheme}://" for scheme in SCHEMES)
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
    spares: int = Field(
        default=0, ge=0, description="workers kept ready beyond max, to take a lost one's place"
    )
    start_timeout_s: float = Field(
        default=300, gt=0, description="seconds to wait for the resources of `min` workers"
    )

    @field_validator("max")
    @classmethod
    def _check_max(cls, value: int | None, info: ValidationInfo) -> int | None:
        least = info.data.get("min", 1)
        if value is not None and value < least:
            raise ValueError(f"must not be less than workers.min, which is {least}")
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _raise_config_error(
        cls, value: Any, handler: ModelWrapValidatorHandler[Workers], info: ValidationInfo
    ) -> Workers:
        """`rayzero.Workers(...)` is refused in the words that `workers:` of a job file is."""
        try:
            return handler(value)
        except ValidationError as error:
            if info.context is None:
                raise_config_error("workers", error_lines(cls, error))
            raise

    @property
    def most(self) -> int:
        return self.min if self.max is None else self.max


class CheckpointSpec(_Section):
    """Where the job's files go, and how often its state does."""

    path: str = Field(
        default="runs",
        min_length=1,
        description="folder for the job's output, relative to the working directory, or a URL "
        "(s3://, gs://, hdfs://) for its checkpoints; the job's own folder in it has its name",
    )
    every_steps: int | None = Field(default=None, ge=1, description="steps between checkpoints")
    keep: int = Field(default=3, ge=1, description="newest checkpoints kept")
    keep_every: int | None = Field(
        default=None,
        ge=1,
        description="checkpoints of multiples of so many steps are kept for ever",
    )
    resume: str = Field(
        default="auto",
        min_length=1,
        description="what to begin from: `auto` is the newest whole checkpoint of the job's "
        "folder, if any; `never` refuses a folder with checkpoints; or a checkpoint's path",
    )
    notice_s: float = Field(
        default=30, gt=0, description="seconds a stop may take for a last checkpoint"
    )
    lease_s: float = Field(
        default=20,
        ge=1,
        description="seconds without a sign of life of the controller after which another cluster "
        "may take the job's folder over",
    )

    @field_validator("path")
    @classmethod
    def _check_scheme(cls, value: str) -> str:
        scheme, separator, rest = value.partition("://")
        if separator and (scheme not in SCHEMES or not rest.strip("/")):
            raise ValueError(f"must be a folder, or a URL such as s3://bucket/runs ({_SCHEMES})")
        return value

    @property
    def is_url(self) -> bool:
        return "://" in self.path


class RecoverySpec(_Section):
    """What happens when something breaks."""

    replicas: int = Field(
        default=1,
        ge=0,
        description="copies of each shard in other memories: in the node's vault, and in so many "
        "other nodes' vaults where there are several",
    )
    mirror_every: int | None = Field(
        default=None,
        ge=1,
        description="steps between two copies; by default chosen so that they cost little",
    )
    hang_timeout_s: float = Field(
        default=120, gt=0, description="seconds without progress that make a rank hung"
    )
    max_faults: int = Field(default=20, ge=0, description="hardware faults allowed in the window")
    fault_window_s: float = Field(default=3600, gt=0, description="seconds of the fault window")
    balance: Literal["even", "auto"] = Field(
        default="even", description="samples of a step: the same for all, or by measured speed"
    )


class MetricsSpec(_Section):
    """What the job tells of itself in numbers."""

    port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="port of /metrics and /snapshot.json on the controller's machine; 0 is any "
        "free one, and which is told; by default nothing is served",
    )
    ports: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="how many ports, from `port` on, are tried in turn: as many as jobs share a "
        "head",
    )
    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="address to serve at; 0.0.0.0 for all, as a pod needs it",
    )
    per_rank: bool = Field(
        default=True,
        description="series with a row for each rank, 16 of them: 1 MB a scrape at 1,000 ranks",
    )
    tensorboard: bool = Field(
        default=False, description="TensorBoard's event files, in tensorboard/ of the job's folder"
    )
    jsonl: bool = Field(
        default=False, description="a line a step in metrics.jsonl of the job's folder"
    )


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
    checkpoint: CheckpointSpec = CheckpointSpec()
    recovery: RecoverySpec = RecoverySpec()
    metrics: MetricsSpec = MetricsSpec()
    faults: list[str] = Field(
        default_factory=list,
        description="faults to inject, such as kill(rank=1, step=7): for tests and trials",
    )
    ledger: bool = Field(
        default=False, description="write down which samples each step consumed, under ledger/"
    )

    @field_validator("entrypoint")
    @classmethod
    def _check_entrypoint(cls, value: str) -> str:
        if not _ENTRYPOINT.fullmatch(value):
            raise ValueError("must be module:function, such as examples.gpt.train:train")
        return value

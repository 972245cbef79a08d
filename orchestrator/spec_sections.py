"""Sections of the job file: their base class, `launch:`, `records:`, `metrics:` and `health:`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class SpecSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _refuse_nul(cls, value: Any) -> Any:
        if isinstance(value, str) and "\0" in value:
            raise ValueError("must not contain a NUL character")
        return value


SCRIPT_ADAPTERS = ("rayzero.deepspeed.install:install", "rayzero.huggingface:install")
"""The default adapters for scripts. Only workers import them: see `workers/launch/adapters.py`."""


class LaunchSpec(SpecSection):
    """A script, or a module, that every worker runs as `__main__`."""

    script: str | None = Field(
        default=None, description="path of the script, from the working directory"
    )
    module: str | None = Field(
        default=None, description="module that is run instead of a script, as by `python -m`"
    )
    args: list[str] = Field(
        default_factory=list,
        description="arguments of the script, sys.argv[1:]",
        json_schema_extra={"items": {"type": ["string", "number"]}},  # `_write_numbers`
    )
    stage: int | None = Field(
        default=None, ge=0, le=3, description="ZeRO stage, where the script has no config"
    )
    deepspeed_config: str | None = Field(
        default=None, description="DeepSpeed config file, where the script has no config"
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="config keys that replace those of the script's own config",
    )
    adapters: list[str] = Field(
        default_factory=lambda: [*SCRIPT_ADAPTERS],
        description="functions (`module:function`) that prepare a process for libraries that "
        "scripts use, such as transformers; called once, before the script is imported",
    )
    timed_steps: list[Annotated[int, Field(ge=1)]] | None = Field(
        default=None,
        description="for a try of --autotuning: the first and the last timed step, after which the "
        "script ends; [] ends it where it builds its engine; the summary has the measurements",
    )

    @field_validator("args", mode="before")
    @classmethod
    def _write_numbers(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [str(arg) if type(arg) in (int, float) else arg for arg in value]

    @model_validator(mode="after")
    def _check_target(self) -> LaunchSpec:
        if bool(self.script) == bool(self.module):
            raise ValueError("set either script or module")
        steps = self.timed_steps
        if steps and (len(steps) != 2 or steps[0] > steps[1]):
            raise ValueError("timed_steps has two numbers, the first step and the last")
        return self


class WandbSpec(SpecSection):
    """A run in Weights & Biases; the head node's environment has the key, `WANDB_API_KEY`."""

    project: str = Field(default="rayzero", min_length=1, description="name of the project")
    entity: str | None = Field(default=None, description="team or user; default: the key's")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: into wandb/ in the job's folder, for `wandb sync`"
    )


class MlflowSpec(SpecSection):
    """A run in MLflow; credentials are in the head node's environment."""

    tracking_uri: str | None = Field(
        default=None, description="URL of the tracking server; default: MLFLOW_TRACKING_URI"
    )
    experiment: str = Field(default="rayzero", min_length=1, description="name of the experiment")


class RecordsSpec(SpecSection):
    """Copies of the job's log and page with its checkpoints, where those are in a store."""

    interval_s: float = Field(
        default=5,
        ge=0.1,
        le=3600,
        description="seconds between two writes: after the controller was killed, at most the "
        "records of this time are missing",
    )
    max_bytes: int = Field(
        default=256 * 2**20,
        ge=2**20,
        description="total size of the log's compressed parts; the oldest are removed",
    )


class MetricsSpec(SpecSection):
    """Metrics endpoint and metric files."""

    port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="port of the page and /metrics on the controller's machine; 0: any "
        "free port, which is printed; default: no endpoint",
    )
    ports: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="number of ports tried in turn, starting at `port`: as many as jobs share a "
        "head node. If all are in use, the next free one is taken, and a line says so",
    )
    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="address to listen on; 0.0.0.0 for all interfaces, which a pod needs",
    )
    per_rank: bool = Field(
        default=True,
        description="11 metrics with a series for each rank: 1.2 MB a scrape at 1,000 ranks",
    )
    log_lines: int = Field(
        default=200,
        ge=0,
        le=2000,
        description="lines of the log that the page shows, the newest; 0: none, for jobs whose "
        "output is not for everyone who can read the endpoint",
    )
    tensorboard: bool = Field(
        default=False,
        description="write TensorBoard event files to tensorboard/ in the job's folder",
    )
    jsonl: bool = Field(
        default=False, description="write a line for each step to metrics.jsonl in the job's folder"
    )
    wandb: WandbSpec | None = Field(
        default=None, description="log every step to Weights & Biases; {} for the defaults"
    )
    mlflow: MlflowSpec | None = Field(
        default=None, description="log every step to MLflow; {} for the defaults"
    )


class HealthSpec(SpecSection):
    """Checks of nodes, before their workers join and after repeated faults."""

    enabled: bool = Field(
        default=True, description="whether nodes are checked; one that fails is avoided"
    )
    slow_factor: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="a node fails if it computes or copies slower than this fraction of the median "
        "of the job's nodes, or sends slower than half this fraction; needs three nodes or more",
    )
    limit_s: float = Field(
        default=10, gt=0, le=3600, description="seconds that the checks of a node may take"
    )
    after_faults: int = Field(
        default=2,
        ge=1,
        description="hardware faults of a node within the fault window after which it is checked "
        "again before a replacement starts there",
    )

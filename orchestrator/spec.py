"""The job file as a model: its keys, their units and defaults."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rayzero.engine.validation import error_lines, raise_config_error
from rayzero.orchestrator.entry_point import EntryPoint
from rayzero.orchestrator.spec_sections import (
    HealthSpec,
    LaunchSpec,
    MetricsSpec,
    RecordsSpec,
    SpecSection,
)
from rayzero.workers.messages import SCRIPT_ENTRYPOINT
from rayzero.workers.nccl_settings import contradictions

SCHEMES = ("file", "s3", "gs", "gcs", "hdfs")  # URL schemes of checkpoint folders

_SCHEMES = ", ".join(f"{scheme}://" for scheme in SCHEMES)

JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_ROLE_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
_RESERVED_ROLES = ("prompts", "rank", "trainer", "worker")
JOB_NAME_RULE = "letters, digits, '.', '_' and '-', at most 63, a letter or digit first"

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GENERATION = "each generation sets it"
_RESERVED = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), _GENERATION),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), _GENERATION),
    "OMP_NUM_THREADS": "workers.cpus sets it",
    "CUDA_VISIBLE_DEVICES": "Ray sets it to the worker's own GPU, by workers.gpus",
}

MAX_WORKERS = 100_000
_MAX_PATH = 4096  # Linux' limit
MAX_LEASE_S = 86_400.0
"""Largest `checkpoint.lease_s`: a lost controller's folder can be taken over after at most this
time."""
_Seconds = Annotated[float, Field(gt=0, le=1e9)]  # the limit of a wait in Python is 9e9 s


class Workers(SpecSection):
    """Number of workers, and the resources of each."""

    min: int = Field(default=1, ge=1, le=MAX_WORKERS, description="minimum number of workers")
    max: int | None = Field(
        default=None, ge=1, le=MAX_WORKERS, description="maximum number of workers; default: min"
    )
    cpus: float | None = Field(
        default=None,
        gt=0,
        description="CPUs that each worker reserves, and its number of compute threads; default: "
        "1. With a GPU each, offload_optimizer's threads are by default the node's CPUs / its GPUs",
    )
    gpus: float = Field(default=0, ge=0, le=1, description="GPUs of each worker: 0 or 1")
    spares: int = Field(
        default=0,
        ge=0,
        le=MAX_WORKERS,
        description="standby workers beyond max, which replace lost ones",
    )
    start_timeout_s: _Seconds = Field(
        default=300, description="seconds to wait until `min` workers have started"
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="environment variables of each worker's process, such as NCCL_DEBUG: INFO; "
        "not for secrets, which Ray would show",
    )

    @field_validator("env")
    @classmethod
    def _check_env(cls, value: dict[str, str]) -> dict[str, str]:
        """Raises ValueError for a name or value that no process can have, for a variable that Ray
        or rayzero sets, and for one that contradicts a setting which repairs depend on."""
        for name, text in value.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r:.100} is not the name of an environment variable")
            if "\0" in text:
                raise ValueError(f"the value of {name} must not contain a NUL character")
            if name in _RESERVED:
                raise ValueError(f"must not set {name}: {_RESERVED[name]}")
            if name.startswith("RAY_"):
                raise ValueError(f"must not set {name}: Ray reads it before a worker starts")
        for setting, seen in contradictions(value):
            if setting.required:
                raise ValueError(f"must not set {seen}: {setting.otherwise}")
        return value

    @field_validator("max")
    @classmethod
    def _check_max(cls, value: int | None, info: ValidationInfo) -> int | None:
        minimum = info.data.get("min", 1)
        if value is not None and value < minimum:
            raise ValueError(f"must not be less than workers.min, which is {minimum}")
        return value

    def __init__(self, **values: Any) -> None:
        """Makes errors of `rayzero.Workers(...)` read like those of `workers:` in a job file."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise_config_error("workers", error_lines(type(self), error))

    # Pydantic skips this __init__ for a part of a job file, so that errors keep the key's path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @property
    def most(self) -> int:
        return self.min if self.max is None else self.max

    @property
    def reserved_cpus(self) -> float:
        return 1.0 if self.cpus is None else self.cpus


def _add_notice_s(schema: dict[str, Any]) -> None:
    """Adds the old name of `grace_period_s` to the JSON schema of `CheckpointSpec`."""
    field = {**schema["properties"]["grace_period_s"], "deprecated": True}
    del field["default"]
    schema["properties"]["notice_s"] = field | {"description": "old name of grace_period_s"}


class CheckpointSpec(SpecSection):
    """The place of checkpoints, and how often they are written."""

    model_config = ConfigDict(json_schema_extra=_add_notice_s)

    path: str = Field(
        default="runs",
        min_length=1,
        max_length=_MAX_PATH,
        description="folder relative to the working directory, or a URL (s3://, gs://, hdfs://); "
        "the job writes its checkpoints and journal to a subfolder with its name",
    )
    every_steps: int | None = Field(default=None, ge=1, description="steps between checkpoints")
    keep: int = Field(default=3, ge=1, description="number of newest checkpoints to keep")
    keep_every: int | None = Field(
        default=None,
        ge=1,
        description="also keep the checkpoints of all multiples of this many steps",
    )
    resume: str = Field(
        default="auto",
        min_length=1,
        max_length=_MAX_PATH,
        description="checkpoint to start from: `auto` is the newest complete one in the job's "
        "folder, if any, and fails if none of those can be used; `scratch` starts without one "
        "and sets the files of the last run aside; `never` fails if the folder has checkpoints; or "
        "the path of a checkpoint",
    )
    grace_period_s: _Seconds = Field(
        default=30, description="seconds that a stop may take, including a last checkpoint"
    )
    lease_s: float = Field(
        default=20,
        ge=1,
        le=MAX_LEASE_S,
        description="seconds without a lease renewal by the controller after which another "
        "cluster may take over the job's folder",
    )

    @model_validator(mode="before")
    @classmethod
    def _rename_notice_s(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "notice_s" not in value:
            return value
        if "grace_period_s" in value:
            raise ValueError("notice_s is the old name of grace_period_s: set only grace_period_s")
        renamed = dict(value)
        renamed["grace_period_s"] = renamed.pop("notice_s")
        return renamed

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


class RecoverySpec(SpecSection):
    """Fault tolerance."""

    replicas: int = Field(
        default=1,
        ge=0,
        description="copies of each shard in memory: one in the node's vault and, on several "
        "nodes, one in each of this many other nodes' vaults; 0: none",
    )
    mirror_every: int | None = Field(
        default=None,
        ge=1,
        description="steps between in-memory copies; default: chosen from their measured cost",
    )
    patience_s: _Seconds = Field(
        default=120,
        description="seconds to wait for a disk, a store, a process that does not answer, or a "
        "rank without a learned limit",
    )
    hang_timeout_s: _Seconds | None = Field(
        default=None,
        description="seconds without progress after which a rank is considered hung, in all "
        "phases; also sets patience_s unless that is given; default: learned from the rank's steps",
    )
    max_faults: int = Field(
        default=20, ge=0, description="maximum number of hardware faults in the fault window"
    )
    fault_window_s: _Seconds = Field(
        default=3600, description="length of the fault window in seconds"
    )
    balance: Literal["even", "auto"] = Field(
        default="even",
        description="samples of a step: the same number for all ranks, or by measured speed",
    )
    orphan_s: _Seconds = Field(
        default=600,
        description="seconds after which workers and vaults end themselves if the cluster's head "
        "does not answer; they end sooner if it says that the job has no process",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_patience_s(cls, value: Any) -> Any:
        """Uses `hang_timeout_s` as the default of `patience_s`: in older job files it is the only
        one of these limits."""
        if not isinstance(value, dict) or value.get("hang_timeout_s") is None:
            return value
        return {"patience_s": value["hang_timeout_s"], **value}


class RoleRecovery(SpecSection):
    """Fault tolerance of a role: each of its workers is started again alone."""

    hang_timeout_s: _Seconds = Field(
        default=120,
        description="seconds without a sign of life after which a worker is considered hung, and "
        "its tasks are given to others",
    )
    max_faults: int = Field(
        default=20, ge=0, description="maximum number of hardware faults in the fault window"
    )
    fault_window_s: _Seconds = Field(
        default=3600, description="length of the fault window in seconds"
    )


class Rollouts(SpecSection):
    """Samples that roles make of prompts, for the ranks to train on."""

    group: int = Field(default=1, ge=1, description="samples of each prompt")
    max_version_lag: int = Field(
        default=1,
        ge=0,
        description="number of steps by which the weights that made a sample may be older than "
        "those that train on it; 0: generators and trainer take turns",
    )
    max_bytes: int = Field(
        default=2**30,
        ge=1,
        description="size of the buffer; beyond it only prompts of the next batch are begun",
    )


class RoleSpec(SpecSection):
    """Other workers of a job, without ranks and rendezvous."""

    entrypoint: EntryPoint = Field(
        description="module:function, called once in each worker with its ctx"
    )
    takes: str | None = Field(
        default=None,
        description="input of the role's tasks: `prompts`, or the name of another role, whose "
        "samples it takes; default: no tasks",
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="passed to the function as ctx.args"
    )
    workers: Workers = Workers()
    recovery: RoleRecovery = RoleRecovery()


def _need_no_entrypoint(schema: dict[str, Any]) -> None:
    schema["required"].remove("entrypoint")  # `launch` takes its place


class JobSpec(SpecSection):
    """A job file."""

    model_config = ConfigDict(json_schema_extra=_need_no_entrypoint)

    name: str = Field(
        description="letters, digits, '.', '_' and '-'; also the name of the job's output folder",
        json_schema_extra={"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$", "maxLength": 63},
    )
    entrypoint: EntryPoint = Field(
        description="module:function, imported on the workers; or file.py:function, from the "
        "working directory"
    )
    launch: LaunchSpec | None = Field(
        default=None, description="a script to run instead of an entrypoint and its args"
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="passed to the function as ctx.args"
    )
    engine: str | dict[str, Any] | None = Field(
        default=None,
        description="DeepSpeed config: a file relative to the job file, or its contents inline",
    )
    workers: Workers = Workers()
    roles: dict[str, RoleSpec] = Field(
        default_factory=dict,
        description="other workers of the job, by the name of their role: generators, rewards, "
        "servers; each is started again alone",
    )
    rollouts: Rollouts | None = Field(
        default=None, description="samples that roles make for the ranks to train on: see `takes`"
    )
    steps: int | None = Field(
        default=None, ge=1, le=sys.maxsize, description="number of optimizer steps, as ctx.steps"
    )
    seed: int = Field(default=0, ge=0, le=sys.maxsize, description="determines the data order")
    checkpoint: CheckpointSpec = CheckpointSpec()
    recovery: RecoverySpec = RecoverySpec()
    health: HealthSpec = HealthSpec()
    metrics: MetricsSpec = MetricsSpec()
    records: RecordsSpec = RecordsSpec()
    faults: list[str] = Field(
        default_factory=list,
        description="faults to inject, such as kill(rank=1, step=7), for tests",
    )
    ledger: bool = Field(
        default=False, description="record the samples that each step consumes, in ledger/"
    )

    @model_validator(mode="before")
    @classmethod
    def _enter_script(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("launch") is None:
            return value
        if value.get("entrypoint", SCRIPT_ENTRYPOINT) != SCRIPT_ENTRYPOINT or value.get("args"):
            raise ValueError("launch takes the place of entrypoint and args: leave those out")
        return value | {"entrypoint": SCRIPT_ENTRYPOINT}

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not JOB_NAME.fullmatch(value):
            raise ValueError(f"must be {JOB_NAME_RULE}")
        return value

    @field_validator("roles")
    @classmethod
    def _check_roles(cls, value: dict[str, RoleSpec]) -> dict[str, RoleSpec]:
        for name in value:
            if not _ROLE_NAME.fullmatch(name) or name in _RESERVED_ROLES:
                raise ValueError(
                    f"{name!r:.100} is not the name of a role: lower-case letters, digits and '-',"
                    f" at most 32, a letter first, and none of {', '.join(_RESERVED_ROLES)}"
                )
        return value


def with_resume(spec: JobSpec, resume: str) -> JobSpec:
    """Returns the spec with another `checkpoint.resume`."""
    checkpoint = spec.checkpoint.model_copy(update={"resume": resume})
    return spec.model_copy(update={"checkpoint": checkpoint})

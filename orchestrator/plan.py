"""A checked job with everything derived from its spec, before anything is started."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from time import time_ns

from rayzero.engine.checkpoint.store import join_url
from rayzero.engine.config import parse_config
from rayzero.engine.errors import ConfigError
from rayzero.engine.redact import redact_url
from rayzero.orchestrator.journal.files import state_url
from rayzero.orchestrator.policies.placement import ResourceRequest
from rayzero.orchestrator.rollout_plan import plan_rollouts, rollout_stages
from rayzero.orchestrator.spec import JobSpec, RoleSpec, Workers
from rayzero.workers.chaos.spec import parse_fault
from rayzero.workers.messages import MirrorPolicy, RoleWorkerSpec, WorkerSpec
from rayzero.workers.rollouts.ledger import RolloutPlan

_RAY_WORKING_DIR = re.compile(r"/working_dir_files/_ray_pkg_[^/]+")
"""Path of an unpacked `--working-dir`; Ray removes it some time after the job."""

DISK_MARGIN_S = 10.0
LOG_FILE = "logs/job.log"  # path of a job's log in its output folder


@dataclass(frozen=True)
class RolePlan:
    """The workers of one role, ready to be requested; `resources` includes spares."""

    name: str
    spec: RoleSpec
    worker_spec: RoleWorkerSpec
    resources: ResourceRequest


@dataclass(frozen=True)
class JobPlan:
    """A checked job, ready to run.

    Args:
        resources: the workers to request, including spares.
        output_dir: the folder of the job's local files.
        job_folder: the folder of its checkpoints: a path or a URL.
        stage: the ZeRO stage of the job's engine config; None if the job has no such config.
        source: a hash of the job's code, see `hash_source`; empty if unknown.
    """

    spec: JobSpec
    worker_spec: WorkerSpec
    resources: ResourceRequest
    output_dir: Path
    job_folder: str
    stage: int | None
    source: str = ""
    roles: tuple[RolePlan, ...] = ()
    rollouts: RolloutPlan | None = None

    @property
    def log_path(self) -> Path:
        return self.output_dir / LOG_FILE

    @property
    def summary_path(self) -> Path:
        return self.output_dir / "summary.json"

    @property
    def journal_url(self) -> str:
        """Path or URL of the job's state file, for messages."""
        return redact_url(state_url(self.job_folder))

    @property
    def disk_limit_s(self) -> float:
        """Longest time that journal and summary wait for their disk. As for the ledger, an outage
        shorter than half of `recovery.patience_s` is tolerated."""
        return self.worker_spec.patience_s / 2 + DISK_MARGIN_S

    @property
    def writes_checkpoints(self) -> bool:
        return self.spec.checkpoint.every_steps is not None

    @property
    def output_is_temporary(self) -> bool:
        """Whether Ray removes the local files some time after the job."""
        return _RAY_WORKING_DIR.search(str(self.output_dir)) is not None


def make_plan(
    spec: JobSpec,
    entrypoint: str | bytes,
    import_paths: tuple[str, ...] = (),
    source: str = "",
    role_functions: Mapping[str, bytes] | None = None,
) -> JobPlan:
    """Plans a run from the current working directory. Raises ConfigError if the output folder
    cannot be created or will be removed by Ray, or a fault is invalid.

    Args:
        spec: the checked spec, with its engine config inline.
        entrypoint: the spec's entrypoint, or a callable pickled by value.
        import_paths: folders that the workers import from, after the working directory.
        source: see `JobPlan`.
        role_functions: by role, callables pickled by value that replace the entry points.
    """
    cwd = os.getcwd()
    path = spec.checkpoint.path
    _refuse_temporary_folder(spec, cwd)
    output_dir = Path(cwd, "runs" if spec.checkpoint.is_url else path, spec.name)
    job_folder = join_url(path, spec.name) if spec.checkpoint.is_url else str(output_dir)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the job's output folder {str(output_dir)!r} cannot be created: {error.strerror}",
            allowed="a folder that can be written to",
            fix="checkpoint.path in the job file",
        ) from None
    engine = spec.engine if isinstance(spec.engine, dict) else None
    worker_spec = _worker_spec(spec, entrypoint, import_paths, output_dir)
    functions, stages = role_functions or {}, rollout_stages(spec)
    roles = (
        _plan_role(
            name,
            role,
            worker_spec,
            functions.get(name, role.entrypoint),
            stages.get(name),
            1 if spec.rollouts is None else spec.rollouts.group,
            spec.workers.start_timeout_s,
        )
        for name, role in spec.roles.items()
    )
    stage = None if engine is None else parse_config(engine).zero_optimization.stage
    return JobPlan(
        spec,
        worker_spec,
        _request(spec.workers, _threads(spec)),
        output_dir,
        job_folder,
        stage,
        source,
        tuple(roles),
        plan_rollouts(spec),
    )


def _request(workers: Workers, threads: int) -> ResourceRequest:
    return ResourceRequest(
        workers.min,
        workers.most + workers.spares,
        workers.reserved_cpus,
        workers.gpus,
        workers.start_timeout_s,
        threads,
        workers.env,
    )


def _plan_role(
    name: str,
    role: RoleSpec,
    trainer: WorkerSpec,
    entrypoint: str | bytes,
    stage: int | None,
    group: int,
    start_timeout_s: float,
) -> RolePlan:
    cpus = role.workers.reserved_cpus
    settings = {field.name: getattr(trainer, field.name) for field in fields(trainer)}
    settings |= {
        "entrypoint": entrypoint,
        "args": role.args,
        "cpus": cpus,
        "gpus": role.workers.gpus,
        "faults": (),
        "patience_s": role.recovery.hang_timeout_s,
        "role": name,
        "stage": stage,
        "group": group,
        "start_timeout_s": start_timeout_s,
    }
    worker_spec = RoleWorkerSpec(**settings)
    return RolePlan(name, role, worker_spec, _request(role.workers, max(1, int(cpus))))


def _worker_spec(
    spec: JobSpec, entrypoint: str | bytes, import_paths: tuple[str, ...], output_dir: Path
) -> WorkerSpec:
    return WorkerSpec(
        name=spec.name,
        entrypoint=entrypoint,
        args=spec.args if spec.launch is None else spec.launch.model_dump(),
        seed=spec.seed,
        steps=spec.steps,
        output_dir=str(output_dir),
        engine_config=spec.engine if isinstance(spec.engine, dict) else None,
        cpus=spec.workers.reserved_cpus,
        gpus=spec.workers.gpus,
        patience_s=spec.recovery.patience_s,
        working_dir=os.getcwd(),
        import_paths=import_paths,
        mirror=MirrorPolicy(
            replicas=spec.recovery.replicas,
            every_steps=spec.recovery.mirror_every,
            checkpoint_every_steps=spec.checkpoint.every_steps,
            version_every_steps=_version_every_steps(spec),
        ),
        faults=tuple(map(parse_fault, spec.faults)),
        ledger=spec.ledger,
        run=f"{time_ns():020d}",
    )


def _version_every_steps(spec: JobSpec) -> int | None:
    """Returns `MirrorPolicy.version_every_steps`. With rollouts, trainer and generators would wait
    for each other if no newer version came. Roles without rollouts find the first version at once,
    and later ones when the ranks mirror."""
    if spec.rollouts is not None:
        return spec.rollouts.max_version_lag + 1
    return sys.maxsize if spec.roles and spec.recovery.replicas else None


def updates_on_cpu(spec: JobSpec) -> bool:
    """Returns whether workers with GPUs run the optimizer on their CPUs."""
    if not isinstance(spec.engine, dict) or not spec.workers.gpus:
        return False
    return parse_config(spec.engine).zero_optimization.offload_optimizer.device != "none"


def _threads(spec: JobSpec) -> int:
    """Returns `ResourceRequest.threads`. Optimizers on CPUs get by default more threads than a
    worker reserves: a larger reservation could leave the job without nodes."""
    if spec.workers.cpus is None and updates_on_cpu(spec):
        return 0
    return max(1, int(spec.workers.reserved_cpus))


def forked_worker_env(spec: JobSpec) -> dict[str, str]:
    """Returns the environment variables that the libraries of a worker on this machine read on
    import."""
    threads = _threads(spec) or os.cpu_count() or 1
    return {**spec.workers.env, "OMP_NUM_THREADS": str(threads)}


def _refuse_temporary_folder(spec: JobSpec, cwd: str) -> None:
    """Refuses checkpoints in a folder that Ray removes: no run could resume from them."""
    checkpoint = spec.checkpoint
    relative = not (checkpoint.is_url or Path(checkpoint.path).is_absolute())
    if relative and checkpoint.every_steps is not None and _RAY_WORKING_DIR.search(cwd):
        raise ConfigError(
            f"checkpoint.path is {checkpoint.path!r}, which is in Ray's copy of the working "
            "directory: Ray removes it after the job, with all checkpoints",
            allowed="a folder that outlives the job and is on all nodes, or an object store URL",
            fix=f"checkpoint.path: /shared/{checkpoint.path} or s3://bucket/{checkpoint.path}, for "
            "example with --set checkpoint.path=...; for a trial, remove checkpoint.every_steps",
        )

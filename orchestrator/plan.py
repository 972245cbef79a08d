"""Everything a run of a job is made from, worked out before anything is started."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from time import time_ns

from rayzero.engine.checkpoint.store import join_url
from rayzero.engine.config import parse_config
from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.policies.placement import ResourceRequest
from rayzero.orchestrator.spec import JobSpec
from rayzero.workers.chaos.spec import parse_fault
from rayzero.workers.messages import MirrorPolicy, WorkerSpec

_RAY_WORKING_DIR = re.compile(r"/working_dir_files/_ray_pkg_[^/]+")
"""Where Ray unpacks a `--working-dir`; it is removed some time after the job."""


@dataclass(frozen=True)
class JobPlan:
    """A checked job, ready to run.

    Args:
        setup: what each worker is told.
        need: the workers to ask for, spares among them.
        output_dir: where the job's local files go.
        archive: where its checkpoints go: a path or a URL.
        stage: the ZeRO stage of the job's engine config; None when the job has no such config.
    """

    spec: JobSpec
    worker_spec: WorkerSpec
    resources: ResourceRequest
    output_dir: Path
    job_folder: str
    stage: int | None

    @property
    def output_is_temporary(self) -> bool:
        """Whether the local files go some time after the job."""
        return _RAY_WORKING_DIR.search(str(self.output_dir)) is not None


def make_plan(
    spec: JobSpec, entrypoint: str | bytes, import_paths: tuple[str, ...] = ()
) -> JobPlan:
    """Plans a run from the current working directory.

    Args:
        spec: checked, its engine config inline.
        entrypoint: what the workers resolve: the spec's own, or a callable pickled by value.
        import_paths: where the workers may import from, after the working directory.

    Raises:
        ConfigError: the output folder cannot be made, is one that Ray removes, or a fault is none.
    """
    cwd = os.getcwd()
    path = spec.checkpoint.path
    _refuse_temporary_folder(spec, cwd)
    output_dir = Path(cwd, "runs" if spec.checkpoint.is_url else path, spec.name)
    archive = join_url(path, spec.name) if spec.checkpoint.is_url else str(output_dir)
    for fault in spec.faults:
        parse_fault(fault)  # refused now, not when it should happen
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the job's output folder {str(output_dir)!r} cannot be made: {error.strerror}",
            allowed="a folder that can be written to",
            fix="checkpoint.path in the job file",
        ) from None
    engine = spec.engine if isinstance(spec.engine, dict) else None
    workers = spec.workers
    setup = WorkerSpec(
        name=spec.name,
        entrypoint=entrypoint,
        args=spec.args,
        seed=spec.seed,
        steps=spec.steps,
        output_dir=str(output_dir),
        engine_config=engine,
        cpus=workers.cpus,
        gpus=workers.gpus,
        hang_timeout_s=spec.recovery.hang_timeout_s,
        working_dir=cwd,
        import_paths=(cwd, *import_paths),
        mirror=MirrorPolicy(
            replicas=spec.recovery.replicas,
            every_steps=spec.recovery.mirror_every,
            checkpoint_every_steps=spec.checkpoint.every_steps,
        ),
        faults=tuple(spec.faults),
        ledger=spec.ledger,
        run=f"{time_ns():020d}",
    )
    most = workers.most + workers.spares
    need = ResourceRequest(workers.min, most, workers.cpus, workers.gpus, workers.start_timeout_s)
    stage = None if engine is None else parse_config(engine).zero_optimization.stage
    return JobPlan(spec, setup, need, output_dir, archive, stage)


def _refuse_temporary_folder(spec: JobSpec, cwd: str) -> None:
    """A run whose checkpoints go with its job cannot be gone on with."""
    wanted = spec.checkpoint
    relative = not (wanted.is_url or Path(wanted.path).is_absolute())
    if relative and wanted.every_steps is not None and _RAY_WORKING_DIR.search(cwd):
        raise ConfigError(
            f"checkpoint.path is {wanted.path!r}, which here is in Ray's copy of the working "
            f"directory: it is removed after the job, and all checkpoints with it",
            allowed="a folder that outlives the job and that all nodes share, or a store's URL",
            fix=f"checkpoint.path: /shared/{wanted.path} or s3://bucket/{wanted.path}, such as "
            "with --set checkpoint.path=...; for a trial, no checkpoint.every_steps",
        )

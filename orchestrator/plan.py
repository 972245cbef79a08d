"""Everything a run of a job is made from, worked out before anything is started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rayzero.engine.config import parse_config
from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.policies.placement import Need
from rayzero.orchestrator.spec import JobSpec
from rayzero.workers.messages import Setup


@dataclass(frozen=True)
class JobPlan:
    """A checked job, ready to run.

    Args:
        setup: what each worker is told.
        stage: the ZeRO stage of the job's engine config; None when the job has no such config.
    """

    spec: JobSpec
    setup: Setup
    need: Need
    output_dir: Path
    stage: int | None


def make_plan(
    spec: JobSpec, entrypoint: str | bytes, import_paths: tuple[str, ...] = ()
) -> JobPlan:
    """Plans a run from the current working directory.

    Args:
        spec: checked, its engine config inline.
        entrypoint: what the workers resolve: the spec's own, or a callable pickled by value.
        import_paths: where the workers may import from, after the working directory.

    Raises:
        ConfigError: the output folder cannot be made.
    """
    cwd = os.getcwd()
    output_dir = Path(cwd, spec.checkpoint.path, spec.name)
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
    setup = Setup(
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
    )
    need = Need(workers.min, workers.most, workers.cpus, workers.gpus, workers.start_timeout_s)
    stage = None if engine is None else parse_config(engine).zero_optimization.stage
    return JobPlan(spec, setup, need, output_dir, stage)

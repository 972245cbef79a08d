"""Checks of a job that is to run on this machine, before Ray starts for it: what fails here would
fail in the job's process many seconds later."""

from __future__ import annotations

from rayzero.orchestrator.checkpoint_store import check_resume_exists
from rayzero.orchestrator.job.entrypoint_check import check_entrypoint, check_module
from rayzero.orchestrator.spec import JobSpec


def check_early(spec: JobSpec, folder: str, *, has_function: bool = False) -> None:
    """Raises ConfigError if the function cannot be called, or there is no such function, or no
    such checkpoint to resume from.

    Args:
        folder: where the workers import from first.
        has_function: whether the function is given itself, not by `entrypoint`.
    """
    if not has_function:
        check_entrypoint(spec.entrypoint, folder, only_here=True)
    if spec.launch is not None and spec.launch.module is not None:
        check_module(spec.launch.module, folder)
    check_resume_exists(spec.checkpoint.resume)

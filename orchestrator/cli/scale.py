"""`rayzero scale`: another number of workers for a running job."""

from __future__ import annotations

from rayzero.orchestrator.bounds import bounds
from rayzero.orchestrator.cli.asking import ask
from rayzero.orchestrator.cli.codes import with_exit_code
from rayzero.orchestrator.wishes import Scale


@with_exit_code
def scale_job(name: str, wanted: str, address: str | None) -> int:
    """Asks the job and prints its answer; returns the process's exit code."""
    print(ask(name, address, "grant", Scale(*bounds(wanted))))
    return 0

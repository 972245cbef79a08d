"""`rayzero scale`: another number of workers for a running job."""

from __future__ import annotations

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.bounds import bounds
from rayzero.orchestrator.cli.run import exit_code
from rayzero.orchestrator.cli.texts import print_error
from rayzero.orchestrator.mailbox import ask
from rayzero.orchestrator.records import at
from rayzero.orchestrator.wishes import Scale


def scale_job(name: str, wanted: str, address: str | None) -> int:
    """Asks the job and prints its answer; returns the process's exit code."""
    try:
        print(ask(at(address), name, Scale(*bounds(wanted))))
    except RayzeroError as error:
        print_error(error)
        return exit_code(error)
    except KeyboardInterrupt:  # while it waited for the answer
        return 130
    return 0

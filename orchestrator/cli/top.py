"""`rayzero top`: a job as it stands, live in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rayzero.orchestrator.cli.codes import with_exit_code
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.top.follow import follow, show_once
from rayzero.orchestrator.top.source import NoContactError, Source, checked, is_url, served_at


@with_exit_code
def watch_job(target: str, address: str | None, once: bool, as_json: bool) -> int:
    with _source(target, address) as source:
        (show_once if once else follow)(source, as_json)
    return 0


@contextmanager
def _source(target: str, address: str | None) -> Iterator[Source]:
    """By address from the job's endpoint, by name from its process."""
    if is_url(target):
        yield served_at(target)
        return
    # Here, because it brings ray with it, and an address does not need it.
    from rayzero.orchestrator.finding import find

    found = find(target, address)

    def ask() -> dict[str, Any]:
        try:
            return checked(found.ask("snapshot"), f"job {target!r}")
        except JobFailedError as error:
            raise NoContactError(error.seen) from None

    try:
        yield ask
    finally:
        found.cluster.close()

"""`rayzero top`: a job as it stands, live in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rayzero.orchestrator.cli.codes import with_exit_code
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.top.follow import follow, show_once
from rayzero.orchestrator.top.source import NoContactError, Source, checked, is_url, served_at
from rayzero.orchestrator.top.stream import Snapshots, shown

_OUTSIDE = ("http://", "https://")


@with_exit_code
def watch_job(target: str, address: str | None, once: bool, as_json: bool) -> int:
    if address is not None and address.startswith(_OUTSIDE) and not is_url(target):
        return _watch_elsewhere(target, address, once, as_json)
    with _source(target, address) as source:
        (show_once if once else follow)(source, as_json)
    return 0


def _watch_elsewhere(name: str, address: str, once: bool, as_json: bool) -> int:
    """From outside the cluster: the same command prints snapshots there, and they are shown here.
    It ends with this one, however this one ends."""
    # Here, because it brings ray with it, and an address does not need it.
    from rayzero.orchestrator.remote import OtherCluster

    cluster = OtherCluster(address)
    job = cluster.begin(["top", name, "--json", *(["--once"] if once else [])], None)
    code: int | None = None
    try:
        with shown(as_json, once) as show:
            told = Snapshots(show, f"job {name!r}")
            code = cluster.follow(job, told.take)
    finally:
        if code is None:
            cluster.end(job)
    if code:
        print("\n".join(told.rest), file=sys.stderr)
    return code


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

"""`rayzero logs`: all that a job printed and told."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cli.codes import with_exit_code
from rayzero.orchestrator.cluster import each
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.finding import FoundJob, look
from rayzero.orchestrator.head import reach
from rayzero.orchestrator.head.log import lines
from rayzero.orchestrator.head.reading import left, live
from rayzero.orchestrator.head.records import recall
from rayzero.orchestrator.places import DEFAULT_PATH, NoJournalError, checked_name, remembered


@with_exit_code
def show_logs(
    name: str, address: str | None, path: str | None, follow: bool, rank: int | None
) -> int:
    """All that a job printed and told; with `follow` until its end."""
    checked_name(name)
    try:
        found = look(name, address)
    except ConfigError as absent:
        try:
            return _from_disk(remembered(path or DEFAULT_PATH, name).log, rank)
        except NoJournalError:
            raise absent from None
    if isinstance(found, FoundJob):
        with closing(found.cluster):
            return _running(found, follow, rank)
    if path is not None:
        return _from_disk(remembered(path, name).log, rank)
    if Path(found.status.log).is_file():
        return _from_disk(found.status.log, rank)
    return _from_head(name, address, rank)


def _running(found: FoundJob, follow: bool, rank: int | None) -> int:
    try:
        file = found.ask("status").log
        _print(lines(live(found.actor, file, follow), rank))
    except (reach.AwayError, reach.GoneError) as error:
        raise JobFailedError(f"job {found.spec.name!r}: {error.seen}") from None
    return 0


def _from_disk(file: str, rank: int | None) -> int:
    if not Path(file).is_file():
        raise ConfigError(
            f"the log of the job is not here: {file}",
            allowed="the machine that the job's controller was on, or its cluster's --address",
        )
    _print(lines(left(file), rank))
    return 0


def _from_head(name: str, address: str | None, rank: int | None) -> int:
    """Through the cluster that knows of it."""
    for cluster in each(address):
        if (record := recall(name)) is not None:
            with closing(cluster):
                try:
                    _print(lines(left(record.status.log), rank))
                except reach.GoneError as error:
                    raise JobFailedError(f"job {name!r}: {error.seen}") from None
                return 0
    raise ConfigError(f"the log of job {name!r} is nowhere to be found")


def _print(found: Iterable[str]) -> None:
    for line in found:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

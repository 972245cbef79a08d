"""Where a job's files are, by its name: for what is asked of jobs that run no longer."""

from __future__ import annotations

import re
from pathlib import Path

from rayzero.engine.checkpoint.store import is_remote, join, open_store
from rayzero.engine.errors import ConfigError
from rayzero.engine.masking import masked
from rayzero.orchestrator.head.outcome import JobStatus
from rayzero.orchestrator.journal.past import Past
from rayzero.orchestrator.journal.segments import folder, read
from rayzero.orchestrator.states import State

DEFAULT_PATH = "runs"
"""checkpoint.path of a job file that does not say it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # as in the job file


class NoJournalError(ConfigError):
    """There is no journal of that job in that folder."""


def checked_name(name: str) -> str:
    """A name that a job can have; so it leads nowhere but into the folder of jobs.

    Raises:
        ConfigError: no job is called so.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name of a job",
            allowed="letters, digits, '.', '_' and '-', at most 63, a letter or digit first",
            fix="the name",
        )
    return name


def archive(path: str, name: str) -> str:
    """A job's own folder in the `checkpoint.path` of its job file."""
    return join(path, checked_name(name))


def past(path: str, name: str) -> Past:
    """What the journal knows of a job's last run.

    Raises:
        NoJournalError: there is no journal.
        StoreError: it cannot be read.
    """
    where = archive(path, name)
    found = read(where)
    if found is None:
        raise NoJournalError(
            f"no job {name!r} is running, and there is no journal in {masked(folder(where))}",
            allowed="a job that runs, or whose checkpoint.path is given",
            fix="the name; --address: the job's cluster; --path: checkpoint.path of its job file",
        )
    return found


def names(path: str) -> list[str]:
    """The jobs with a journal in a `checkpoint.path`."""
    folders = [one.name for one in open_store(path).entries() if one.is_folder]
    ours = [name for name in folders if _NAME.fullmatch(name)]
    return sorted(name for name in ours if open_store(folder(join(path, name))).entries())


def remembered(path: str, name: str) -> JobStatus:
    """How a job stood when its journal ends. Its state is None if it was lost.

    Raises:
        As `past`.
    """
    found, where = past(path, name), archive(path, name)
    least, most = found.scaled or (found.spec["workers"]["min"], found.spec["workers"]["max"])
    causes = [str(one.cause) for one in found.faults]
    return JobStatus(
        name=name,
        state=State(found.ended) if found.ended else None,
        step=found.step,
        steps=found.spec.get("steps"),
        generation=found.generation,
        world_size=found.world_size,
        workers_min=least,
        workers_max=most,
        began_at_s=found.began_at_s,
        at_s=found.at_s,
        faults={cause: causes.count(cause) for cause in sorted(set(causes))},
        repairs=found.repairs,
        checkpoint_step=found.checkpoint_step,
        journal=masked(folder(where)),
        log="" if is_remote(where) else str(Path(where, "logs", "job.log")),
        error=found.error.partition("\n")[0],
    )

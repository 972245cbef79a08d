"""A job by name: running, ended, or in its journal.

Where a job's files are, by its name: for what is asked of jobs that run no longer.

From a job's name to its process, wherever it runs.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayzero.engine.checkpoint.open_store import open_store
from rayzero.engine.checkpoint.store import is_remote, join_url
from rayzero.engine.errors import ConfigError, did_you_mean
from rayzero.engine.redact import redact_url
from rayzero.orchestrator.cluster.connect import ClusterConnection, connect_each
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job import client as reach
from rayzero.orchestrator.job.ended_jobs import EndedJobRecord, load_ended
from rayzero.orchestrator.journal.files import has_journal, read_journal, state_url
from rayzero.orchestrator.journal.run_history import RunHistory
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.results import JobStatus
from rayzero.orchestrator.spec import JobSpec

DEFAULT_CHECKPOINT_PATH = "runs"
"""checkpoint.path of a job file that does not say it."""

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # as in the job file


class NoJournalError(ConfigError):
    """There is no journal of that job in that folder."""


def check_job_name(name: str) -> str:
    """A name that a job can have; so it leads nowhere but into the folder of jobs.

    Raises:
        ConfigError: no job is called so.
    """
    if not _JOB_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name of a job",
            allowed="letters, digits, '.', '_' and '-', at most 63, a letter or digit first",
            fix="the name",
        )
    return name


def job_folder(path: str, name: str) -> str:
    """A job's own folder in the `checkpoint.path` of its job file."""
    return join_url(path, check_job_name(name))


def load_run_history(path: str, name: str) -> RunHistory:
    """What the journal knows of a job's last run.

    Raises:
        NoJournalError: there is no journal.
        StoreError: it cannot be read.
    """
    where = job_folder(path, name)
    found = read_journal(where)
    if found is None:
        raise NoJournalError(
            f"no job {name!r} is running, and there is no journal in {redact_url(where)}",
            allowed="a job that runs, or whose checkpoint.path is given",
            fix="the name; --address: the job's cluster; --path: checkpoint.path of its job file",
        )
    return found


def list_journaled_jobs(path: str) -> list[str]:
    """The jobs with a journal in a `checkpoint.path`."""
    folders = [one.name for one in open_store(path).list_folder() if one.is_folder]
    ours = [name for name in folders if _JOB_NAME.fullmatch(name)]
    return sorted(name for name in ours if has_journal(join_url(path, name)))


def status_from_journal(path: str, name: str) -> JobStatus:
    """How a job stood when its journal ends. Its state is None if it was lost.

    Raises:
        As `past`.
    """
    found, where = load_run_history(path, name), job_folder(path, name)
    least, most = found.scaled_limits or (
        found.spec["workers"]["min"],
        found.spec["workers"]["max"],
    )
    causes = [str(one.cause) for one in found.faults]
    return JobStatus(
        name=name,
        state=State(found.end_state) if found.end_state else None,
        step=found.step,
        steps=found.spec.get("steps"),
        generation=found.generation,
        world_size=found.world_size,
        workers_min=least,
        workers_max=most,
        began_at_s=found.began_at_s,
        at_s=found.last_at_s,
        faults={cause: causes.count(cause) for cause in sorted(set(causes))},
        repairs=found.total_repairs,
        checkpoint_step=found.checkpoint_step,
        journal=redact_url(state_url(where)),
        log="" if is_remote(where) else str(Path(where, "logs", "job.log")),
        error=found.error.partition("\n")[0],
    )


LOOKUP_TIMEOUT_S = 15.0
"""How long a job may take to answer: recovery may keep it busy."""


@dataclass(frozen=True)
class RunningJob:
    """A running job. `cluster` is the connection to it, which is the finder's to close."""

    spec: JobSpec
    actor: Any
    cluster: ClusterConnection

    def call(self, method: str, *args: Any) -> Any:
        """
        Raises:
            JobFailedError: it does not answer, or has ended.
            ConfigError: what is asked for cannot be.
        """
        try:
            return reach.call(self.actor, method, *args, timeout_s=LOOKUP_TIMEOUT_S)
        except (reach.JobUnavailableError, reach.JobProcessLostError) as error:
            raise JobFailedError(f"job {self.spec.name!r}: {error.seen}") from None


def find_running(name: str, address: str | None) -> RunningJob:
    """The running job of that name, in the cluster at `address` or RAY_ADDRESS, or else in any
    whose head runs on this machine.

    Raises:
        ConfigError: there is none.
        JobFailedError: it does not answer.
    """
    found = find_any(name, address)
    if isinstance(found, EndedJobRecord):
        ended_s = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.status.at_s))
        raise ConfigError(
            f"no running job is called {name!r}: it {found.status.state} at {ended_s}",
            fix=f"`rayzero status {name}` or `rayzero logs {name}`, or submit it again",
        )
    return found


def find_any(name: str, address: str | None) -> RunningJob | EndedJobRecord:
    """As `find`; how it ended, if it does not run any more and one of the clusters knows.

    Raises:
        ConfigError: no cluster knows of it.
        JobFailedError: it does not answer.
    """
    running: list[str] = []
    ended: list[EndedJobRecord] = []
    for cluster in connect_each(address):
        try:
            if (found := _in_cluster(name, cluster)) is not None:
                return found
            running += reach.list_running()
            if (record := load_ended(name)) is not None:
                ended.append(record)
        except BaseException:
            cluster.close()
            raise
    if ended:
        return max(ended, key=lambda one: one.status.at_s)
    raise ConfigError(
        f"no running job is called {name!r}{did_you_mean(name, running)}",
        allowed=f"a running job: {', '.join(sorted(running))}" if running else "",
        fix="the name, or --address or RAY_ADDRESS, which say in which cluster to look",
    )


def _in_cluster(name: str, cluster: ClusterConnection) -> RunningJob | None:
    actor = reach.find_job_actor(name)
    if actor is None:
        return None
    try:
        spec = reach.call(actor, "spec", timeout_s=LOOKUP_TIMEOUT_S)
    except reach.JobProcessLostError:
        return None
    except reach.JobUnavailableError as away:
        raise JobFailedError(f"job {name!r}: {away.seen}") from None
    return None if spec is None else RunningJob(spec, actor, cluster)

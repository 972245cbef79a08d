"""Jobs by name: the running process, the record of the end, the journal, the folder."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayzero.engine.checkpoint.errors import StoreError, store_errors
from rayzero.engine.checkpoint.store import is_remote, join_url, open_store
from rayzero.engine.errors import ConfigError, did_you_mean
from rayzero.engine.redact import redact_url
from rayzero.orchestrator.cluster.connect import ClusterConnection, connect_each
from rayzero.orchestrator.facts import JobFacts
from rayzero.orchestrator.job.actor import JobActor
from rayzero.orchestrator.job.client import JobProcess, JobProcessLostError, list_running
from rayzero.orchestrator.job.ended_jobs import load_ended
from rayzero.orchestrator.job.log_upload import LOG_FOLDER
from rayzero.orchestrator.journal.files import (
    SEGMENTS_FOLDER,
    STATE_FILE,
    has_journal,
    read_sound_journal,
    state_url,
)
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.plan import LOG_FILE
from rayzero.orchestrator.results import EndedJob, JobStatus, RoleStatus
from rayzero.orchestrator.role_facts import RoleFacts
from rayzero.orchestrator.spec import JOB_NAME, JOB_NAME_RULE, JobSpec
from rayzero.workers.lifetimes import end_owned, has_process


class NoJournalError(ConfigError):
    """The folder has no journal of the job."""


def check_job_name(name: str) -> str:
    """Returns the name itself if it is a valid job name. As a path, such a name cannot lead out of
    the folder of jobs. Raises ConfigError if the name is not valid."""
    if not JOB_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a valid job name",
            allowed=JOB_NAME_RULE,
            fix="change the name",
        )
    return name


def job_folder(path: str, name: str) -> str:
    """Returns the folder of a job below the `checkpoint.path` of its job file."""
    return join_url(path, check_job_name(name))


def load_run_history(path: str, name: str) -> JobFacts:
    """Returns the facts in the journal of a job's last run. Raises NoJournalError if there is no
    journal; StoreError or ConfigError if it cannot be read."""
    folder = job_folder(path, name)
    history = read_sound_journal(folder)
    if history is None:
        entries = open_store(path).list_folder()
        names = [entry.name for entry in entries if entry.is_folder and entry.name != name]
        raise NoJournalError(
            f"no job {name!r} is running, and there is no journal in {redact_url(folder)}"
            f"{did_you_mean(name, names)}",
            allowed="a running job, or a job in the given checkpoint.path",
            fix="check the name; --address: the job's cluster; --path: checkpoint.path of its job "
            "file",
        )
    return history


def check_journal_owner(path: str, name: str) -> None:
    """Checks that no other user can have written a job's journal, because resuming from it imports,
    and so runs, the code that it names. Buckets are not checked: their access rules are not visible
    here. Raises ConfigError if another user owns or may write the job's folder or its journal."""
    folder = job_folder(path, name)
    if is_remote(folder):
        return
    top = Path(folder.removeprefix("file://"))
    for place in (top, top / STATE_FILE, segments := top / SEGMENTS_FOLDER, *segments.glob("*")):
        with store_errors(str(place)), suppress(FileNotFoundError):
            status = place.stat()
            writers = stat.S_IWOTH | (0 if _is_own_group(status.st_gid) else stat.S_IWGRP)
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & writers:
                raise ConfigError(
                    f"other users can write {place} (owner {status.st_uid}, mode "
                    f"{stat.S_IMODE(status.st_mode):o}), and a resume runs code that it names",
                    allowed="a job's folder and journal that only you or root can write",
                    fix=f"look at {top / STATE_FILE}, then `chown -R $USER {top}` and `chmod -R "
                    f"go-w {top}`; or submit the job file itself",
                )


def _is_own_group(gid: int) -> bool:
    """Returns whether `gid` is the private group that many systems create for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user and {*group.gr_mem} <= {user}


def list_journaled_jobs(path: str) -> list[str]:
    """Names of the jobs with a journal in a `checkpoint.path`."""
    folders = [entry.name for entry in open_store(path).list_folder() if entry.is_folder]
    names = [name for name in folders if JOB_NAME.fullmatch(name)]
    return sorted(name for name in names if _may_have_journal(join_url(path, name)))


def _may_have_journal(folder: str) -> bool:
    """Returns whether the folder has a journal, or cannot be read. In the second case the caller
    that reads the journal gets the error."""
    try:
        return has_journal(folder)
    except StoreError:
        return True


def status_from_journal(path: str, name: str) -> JobStatus:
    """Returns the last status in a job's journal. The state is None if the run was lost. Raises as
    `load_run_history`."""
    history, folder = load_run_history(path, name), job_folder(path, name)
    workers: Any = history.spec.get("workers")
    try:
        least, most = history.scaled_limits or (int(workers["min"]), int(workers["max"]))
        roles = {
            name: _role_status(role["workers"], history.role(name))
            for name, role in history.spec.get("roles", {}).items()
        }
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
        raise NoJournalError(f"{redact_url(state_url(folder))} states no workers") from None
    return JobStatus(
        name=name,
        state=State(history.end_state) if history.end_state else None,
        step=history.step,
        steps=history.steps,
        generation=history.generation,
        world_size=history.world_size,
        workers_min=least,
        workers_max=most,
        loss=history.counters.loss,
        began_at_s=history.began_at_s,
        at_s=history.last_at_s,
        faults=dict(sorted(history.faults_by_cause.items())),
        repairs=history.total_repairs,
        checkpoint_step=history.checkpoint_step,
        journal=redact_url(state_url(folder)),
        log=redact_url(join_url(folder, LOG_FOLDER if "://" in folder else LOG_FILE)),
        error=history.error.partition("\n")[0],
        roles=roles,
    )


def _role_status(workers: Any, facts: RoleFacts) -> RoleStatus:
    """Returns the status of a role that has no running workers."""
    least, most = facts.scaled or (int(workers["min"]), int(workers["max"]))
    faults = dict(sorted(facts.faults.items()))
    return RoleStatus(0, least, most, facts.finished, faults)


@dataclass(frozen=True)
class RunningJob:
    """A running job. The caller closes `cluster`, the connection to it."""

    spec: JobSpec
    process: JobProcess
    cluster: ClusterConnection


def find_running(name: str, address: str | None) -> RunningJob:
    """Returns the running job of that name in the cluster at `address` or RAY_ADDRESS, by default
    in any cluster whose head node is this machine. Raises ConfigError if no such job is running;
    JobFailedError if the job does not answer."""
    job = find_any(name, address)
    if isinstance(job, EndedJob):
        ended_s = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.status.at_s))
        raise ConfigError(
            f"no running job is called {name!r}: it {job.status.state} at {ended_s}",
            fix=f"run `rayzero status {name}` or `rayzero logs {name}`, or submit it again",
        )
    return job


def find_any(name: str, address: str | None) -> RunningJob | EndedJob:
    """Finds a running job as `find_running` does, or else the record of its end, if a cluster has
    one. Raises ConfigError if no cluster has the job or such a record; JobFailedError if the job
    does not answer."""
    running: list[str] = []
    ended: list[EndedJob] = []
    for cluster in connect_each(address):
        try:
            if (job := _in_cluster(name, cluster)) is not None:
                return job
            running += [process.name for process in list_running()]
            if (record := load_ended(name)) is not None:
                ended.append(record)
        except BaseException:
            cluster.close()
            raise
    if ended:
        return max(ended, key=lambda record: record.status.at_s)
    raise ConfigError(
        f"no running job is called {name!r}{did_you_mean(name, running)}",
        allowed=f"a running job: {', '.join(sorted(running))}" if running else "",
        fix="check the name; --address or RAY_ADDRESS for another cluster; --path with the "
        "checkpoint.path of its job file if the job, or its cluster, has ended",
    )


def end_leftovers(name: str, address: str | None) -> int:
    """Ends the actors and placement groups that a job has left in clusters where its process has
    ended. Returns their number. `address` is as for `find_running`. Raises as `connect_each`."""
    number = 0
    for cluster in connect_each(address):
        try:
            if not has_process(name):
                number += len(end_owned(name))
        except BaseException:
            cluster.close()
            raise
    return number


def _in_cluster(name: str, cluster: ClusterConnection) -> RunningJob | None:
    try:
        process = JobProcess.find(name)
        spec = None if process is None else process.call(JobActor.spec)
    except JobProcessLostError:
        return None
    return None if process is None or spec is None else RunningJob(spec, process, cluster)

"""A client's access to a job's process, which is a detached Ray actor, and to the job's log."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util import list_named_actors

from rayzero.engine.errors import RayzeroError, first_line
from rayzero.orchestrator.cluster.ray_api import controller_resources, death_cause, head_node_id
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job.actor import JobActor
from rayzero.orchestrator.job.log import LogPosition, read_log
from rayzero.orchestrator.plan import JobPlan
from rayzero.workers.lifetimes import NAMESPACE, job_actor_name, job_of_actor

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_RESTARTS = 20  # how often Ray restarts a job's process; each time it adopts its own run
CALL_TIMEOUT_S = 15.0  # limit for a reply of a job's process, which a recovery may keep busy
LOG_TASK_TIMEOUT_S = 60.0
"""Limit for a task that reads the log on another node. Ray may have to start a process for it."""
LOG_POLL_S = 0.5
_MAX_CONCURRENT_CALLS = 1000  # each follower always has one call waiting in the job's process


class JobUnavailableError(JobFailedError):
    """The job's process does not answer; Ray may be restarting it."""


class JobProcessLostError(JobFailedError):
    """The job's process has ended."""


@dataclass(frozen=True)
class JobProcess:
    """The process of the job `name` in the connected cluster."""

    name: str
    actor: Any

    @classmethod
    def start(cls, plan: JobPlan, can_grow: bool) -> JobProcess:
        """Starts the process of a job. Raises ValueError if a job of that name has one already."""
        name = plan.spec.name
        actor = ray.remote(JobActor).options(
            name=job_actor_name(name),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=_MAX_CONCURRENT_CALLS,
            max_restarts=MAX_RESTARTS,
            resources=controller_resources(),
        )
        return cls(name, actor.remote(plan, can_grow))

    @classmethod
    def find(cls, name: str) -> JobProcess | None:
        """Returns the process of a job; None if the cluster has none."""
        try:
            return cls(name, ray.get_actor(job_actor_name(name), namespace=NAMESPACE))
        except ValueError:
            return None

    def call(
        self,
        method: Callable[[JobActor, *Ts], Coroutine[Any, Any, T]],
        *args: *Ts,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> T:
        """Calls a method of `JobActor` in the process. Raises what the method raises;
        JobUnavailableError if there is no reply within `timeout_s`, or Ray is restarting the
        process; JobProcessLostError if the process has ended."""
        process, remote = f"the process of job {self.name!r}", getattr(self.actor, method.__name__)
        try:
            reply: T = ray.get(remote.remote(*args), timeout=timeout_s)
            return reply
        except (ActorUnavailableError, GetTimeoutError) as error:
            raise JobUnavailableError(f"{process} does not answer: {first_line(error)}") from None
        except RayActorError as error:
            raise JobProcessLostError(f"{process} is gone: {death_cause(error)}") from None
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, RayzeroError):
                raise cause from None
            raise JobFailedError(f"{process} failed: {first_line(cause)}") from None

    def request_stop(self) -> None:
        """Requests the job's end without waiting for a reply. Safe in a signal handler."""
        self.actor.stop.remote()


def list_running() -> list[JobProcess]:
    """Returns the processes of all jobs in the connected cluster, sorted by name."""
    actors: list[dict[str, str]] = list_named_actors(all_namespaces=True)
    names = sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)
    jobs = [job for name in names if (job := job_of_actor(name)) is not None]
    return [process for job in jobs if (process := JobProcess.find(job)) is not None]


def read_job_log(
    path: str, process: JobProcess | None = None, follow: bool = False
) -> Iterator[bytes]:
    """Yields a job's log in parts, from its beginning. An empty part means that there is no more
    yet.

    As long as the job's process lives it reads the log, to the current end, or with `follow` to the
    job's end. Then the file is read from this machine's disk, or else by a task on the node where
    jobs' processes run.

    Raises:
        JobFailedError: neither the process nor that node answers.
    """
    position = LogPosition()
    while process is not None:
        try:
            has_ended = process.call(JobActor.spec) is None
            part, position = process.call(JobActor.log, position)
        except JobProcessLostError:
            break
        yield part
        if not part:
            if has_ended or not follow:
                return
            time.sleep(LOG_POLL_S)
    file = Path(path)
    read = read_log if file.is_file() else _read_log_remotely
    while True:
        part, position = read(file, position)
        if not part:
            return
        yield part


def _read_log_remotely(path: Path, position: LogPosition) -> tuple[bytes, LogPosition]:
    if not ray.is_initialized():
        raise JobFailedError("the connection to the cluster is closed")
    if head_node_id() is None:
        raise JobFailedError("the cluster has no live head node")
    task = ray.remote(read_log).options(num_cpus=0, resources=controller_resources())
    try:
        part: tuple[bytes, LogPosition] = ray.get(
            task.remote(path, position), timeout=LOG_TASK_TIMEOUT_S
        )
        return part
    except RayError as error:
        raise JobFailedError(
            f"the node of the job's process does not answer: {first_line(error)}"
        ) from None

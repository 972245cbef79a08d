"""Find, start, call a job actor; read its log.

Where a job's process is found and started: a detached actor on the head, named after the job.

A client that reads a job's log: from its process, and from the head's disk when that is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Condition
from types import TracebackType
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayzero.engine.errors import RayzeroError, first_line
from rayzero.orchestrator.cluster.ray_api import death_cause
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job.actor import JobActor
from rayzero.orchestrator.job.log import LogPosition, read_log
from rayzero.orchestrator.plan import JobPlan

NAMESPACE = "rayzero"


_ACTOR_PREFIX = "job-"


_HEAD_RESOURCE = "node:__internal_head__"  # a resource that Ray gives the head's node alone


_MAX_CONCURRENT_CALLS = 1000
"""Calls that may wait in a job's process at the same time: each follower has one there."""

HEAD_TASK_TIMEOUT_S = 60.0
"""How long a question to the head's machine may take: it may need a process for it."""


MAX_RESTARTS = 20
"""How often Ray starts a job's process anew; each time it adopts its own run."""


T = TypeVar("T")


class JobUnavailableError(RayzeroError):
    """The job's process does not answer now, and may again: it is being started anew."""


class JobProcessLostError(RayzeroError):
    """The job's process is gone for good."""


def start_job_actor(plan: JobPlan, can_grow: bool) -> Any:
    """Starts a job's process.

    Raises:
        ValueError: there is one of that name.
    """
    strategy = None
    if (node := _head_node_id()) is not None:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(JobActor).options(
        name=_ACTOR_PREFIX + plan.spec.name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=_MAX_CONCURRENT_CALLS,
        max_restarts=MAX_RESTARTS,
        scheduling_strategy=strategy,
    )
    return actor.remote(plan, can_grow)


def find_job_actor(name: str) -> Any | None:
    """The process of the job of that name, if there is one in this cluster."""
    try:
        return ray.get_actor(_ACTOR_PREFIX + name, namespace=NAMESPACE)
    except ValueError:
        return None


def list_running() -> list[str]:
    """The names of the jobs of this cluster that have a process."""
    actors: list[dict[str, str]] = list_named_actors(all_namespaces=True)
    ours = [one["name"] for one in actors if one["namespace"] == NAMESPACE]
    return sorted(
        name.removeprefix(_ACTOR_PREFIX) for name in ours if name.startswith(_ACTOR_PREFIX)
    )


def call(actor: Any, method: str, *args: Any, timeout_s: float) -> Any:
    """What a job's process answers; an error that it answers is raised.

    Raises:
        JobUnavailableError, GoneError: it does not answer.
        RayzeroError: what the call raises.
    """
    try:
        answer = ray.get(getattr(actor, method).remote(*args), timeout=timeout_s)
    except (ActorUnavailableError, GetTimeoutError) as error:
        raise JobUnavailableError(
            f"the job's process does not answer: {first_line(error)}"
        ) from None
    except RayActorError as error:
        raise JobProcessLostError(f"the job's process is gone: {death_cause(error)}") from None
    except RayError as error:
        raise JobFailedError(f"the job's process failed: {first_line(error)}") from None
    if isinstance(answer, RayzeroError):
        raise answer
    return answer


def run_on_head(read: Callable[..., T], *args: Any) -> T:
    """What a function says on the head's machine.

    Raises:
        GoneError: there is no head, or it does not answer.
    """
    if not ray.is_initialized():
        raise JobProcessLostError("the connection to the cluster is closed")
    if (node := _head_node_id()) is None:
        raise JobProcessLostError("the cluster has no head that could be asked")
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(read).options(num_cpus=0, scheduling_strategy=strategy)
    try:
        found: T = ray.get(task.remote(*args), timeout=HEAD_TASK_TIMEOUT_S)
    except RayError as error:
        raise JobProcessLostError(
            f"the cluster's head does not answer: {first_line(error)}"
        ) from None
    return found


def call_async(actor: Any, method: str) -> None:
    """As `call`, but waits for nothing. May be called from a signal handler's thread."""
    getattr(actor, method).remote()


def _head_node_id() -> str | None:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return next(
        (one["NodeID"] for one in nodes if one["Alive"] and _HEAD_RESOURCE in one["Resources"]),
        None,
    )


LOG_POLL_S = 0.5
"""How often somebody who follows a log asks."""


LOG_CALL_TIMEOUT_S = 15.0
"""How long an answer may take."""


class LogReaders:
    """Counts those who are reading, so that their connection is not closed under them."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_idle(self, limit_s: float) -> None:
        """Until nobody reads."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0, limit_s)


def tail_running(actor: Any, path: str, follow: bool) -> Iterator[bytes]:
    """A running job's log, from its beginning, in parts; an empty one where there is no more yet.

    Args:
        path: the log's file on the head, for the rest of it when the process is gone.
        follow: to the job's end; else what there is.

    Raises:
        JobUnavailableError, GoneError: nobody answers.
    """
    place = LogPosition()
    try:
        while True:
            over = call(actor, "spec", timeout_s=LOG_CALL_TIMEOUT_S) is None
            part, place = call(actor, "log", place, timeout_s=LOG_CALL_TIMEOUT_S)
            yield part
            if not part:
                if over or not follow:
                    return
                time.sleep(LOG_POLL_S)
    except JobProcessLostError:
        yield from read_ended(path, place)


def read_ended(path: str, place: LogPosition | None = None) -> Iterator[bytes]:
    """The log of a job that has ended, from the disk of this machine, or else of the head's.

    Raises:
        GoneError: the head does not answer.
    """
    here = Path(path).is_file()
    place = place or LogPosition()
    while True:
        part, place = (
            read_log(Path(path), place) if here else run_on_head(read_log, Path(path), place)
        )
        if not part:
            return
        yield part

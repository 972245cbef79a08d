"""Calls to a job's process, a detached Ray actor on the head node; and readers of its log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Condition
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
"""Concurrent calls in a job's process: each subscriber always has one waiting there."""

HEAD_TASK_TIMEOUT_S = 60.0
"""Limit for a task on the head node, which may have to start a worker process first."""


MAX_RESTARTS = 20
"""How often Ray restarts a job's process; each time it adopts its own run."""


T = TypeVar("T")


class JobUnavailableError(RayzeroError):
    """The job's process does not answer; Ray may be restarting it."""


class JobProcessLostError(RayzeroError):
    """The job's process has ended."""


def start_job_actor(plan: JobPlan, can_grow: bool) -> Any:
    """Starts a job's process.

    Raises:
        ValueError: a job of that name has a process already.
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
    """The actor handle of that job; None if this cluster has none."""
    try:
        return ray.get_actor(_ACTOR_PREFIX + name, namespace=NAMESPACE)
    except ValueError:
        return None


def list_running() -> list[str]:
    """Names of the jobs with a process in this cluster."""
    actors: list[dict[str, str]] = list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return sorted(
        name.removeprefix(_ACTOR_PREFIX) for name in names if name.startswith(_ACTOR_PREFIX)
    )


def call(actor: Any, method: str, *args: Any, timeout_s: float) -> Any:
    """The reply of a job's process; an error that it returns is raised.

    Raises:
        JobUnavailableError: no reply within `timeout_s`, or the process is being restarted.
        JobProcessLostError: the process has ended.
        RayzeroError: as the method raises or returns.
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
    """The result of a function that runs as a task on the head node.

    Raises:
        JobProcessLostError: there is no head node, or it does not answer.
    """
    if not ray.is_initialized():
        raise JobProcessLostError("the connection to the cluster is closed")
    if (node := _head_node_id()) is None:
        raise JobProcessLostError("the cluster has no live head node")
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(read).options(num_cpus=0, scheduling_strategy=strategy)
    try:
        result: T = ray.get(task.remote(*args), timeout=HEAD_TASK_TIMEOUT_S)
    except RayError as error:
        raise JobProcessLostError(
            f"the cluster's head node does not answer: {first_line(error)}"
        ) from None
    return result


def call_async(actor: Any, method: str) -> None:
    """Like `call` without waiting for the reply. Safe in a signal handler."""
    getattr(actor, method).remote()


def _head_node_id() -> str | None:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return next(
        (node["NodeID"] for node in nodes if node["Alive"] and _HEAD_RESOURCE in node["Resources"]),
        None,
    )


LOG_POLL_S = 0.5
"""Interval at which a log is polled."""


LOG_CALL_TIMEOUT_S = 15.0
"""Limit for one reply."""


class LogReaders:
    """Counts active log readers, whose connection must stay open."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_idle(self, limit_s: float) -> None:
        """Waits until there is no reader, up to `limit_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0, limit_s)


def tail_running(actor: Any, path: str, follow: bool) -> Iterator[bytes]:
    """A running job's log from the beginning, in parts; an empty part where there is no more yet.

    Args:
        path: the log file on the head node, to read the rest when the process has ended.
        follow: until the job's end, instead of the current end of the log.

    Raises:
        JobUnavailableError, JobProcessLostError: neither the process nor the head node answers.
    """
    position = LogPosition()
    try:
        while True:
            has_ended = call(actor, "spec", timeout_s=LOG_CALL_TIMEOUT_S) is None
            part, position = call(actor, "log", position, timeout_s=LOG_CALL_TIMEOUT_S)
            yield part
            if not part:
                if has_ended or not follow:
                    return
                time.sleep(LOG_POLL_S)
    except JobProcessLostError:
        yield from read_ended(path, position)


def read_ended(path: str, position: LogPosition | None = None) -> Iterator[bytes]:
    """The log of a job that has ended, from a disk of this machine or else of the head node.

    Raises:
        JobProcessLostError: the head node does not answer.
    """
    file, position = Path(path), position or LogPosition()
    is_local = file.is_file()
    while True:
        part, position = (
            read_log(file, position) if is_local else run_on_head(read_log, file, position)
        )
        if not part:
            return
        yield part

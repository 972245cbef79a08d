"""Where a job's process is found and started: a detached actor on the head, named after the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayzero.engine.errors import RayzeroError, first_line
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.head.actor import JobActor
from rayzero.orchestrator.lost import cause
from rayzero.orchestrator.plan import JobPlan

NAMESPACE = "rayzero"
_PREFIX = "job-"
_HEAD = "node:__internal_head__"  # a resource that Ray gives the head's node alone
_CALLS = 1000
"""Calls that may wait in a job's process at the same time: each follower has one there."""

HEAD_S = 60.0
"""How long a question to the head's machine may take: it may need a process for it."""
RESTARTS = 20
"""How often Ray starts a job's process anew; each time it adopts its own run."""


T = TypeVar("T")


class AwayError(RayzeroError):
    """The job's process does not answer now, and may again: it is being started anew."""


class GoneError(RayzeroError):
    """The job's process is gone for good."""


def start(plan: JobPlan, can_grow: bool) -> Any:
    """Starts a job's process.

    Raises:
        ValueError: there is one of that name.
    """
    strategy = None
    if (node := _head()) is not None:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(JobActor).options(
        name=_PREFIX + plan.spec.name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=_CALLS,
        max_restarts=RESTARTS,
        scheduling_strategy=strategy,
    )
    return actor.remote(plan, can_grow)


def find(name: str) -> Any | None:
    """The process of the job of that name, if there is one in this cluster."""
    try:
        return ray.get_actor(_PREFIX + name, namespace=NAMESPACE)
    except ValueError:
        return None


def running() -> list[str]:
    """The names of the jobs of this cluster that have a process."""
    actors: list[dict[str, str]] = list_named_actors(all_namespaces=True)
    ours = [one["name"] for one in actors if one["namespace"] == NAMESPACE]
    return sorted(name.removeprefix(_PREFIX) for name in ours if name.startswith(_PREFIX))


def call(actor: Any, method: str, *args: Any, timeout_s: float) -> Any:
    """What a job's process answers; an error that it answers is raised.

    Raises:
        AwayError, GoneError: it does not answer.
        RayzeroError: what the call raises.
    """
    try:
        answer = ray.get(getattr(actor, method).remote(*args), timeout=timeout_s)
    except (ActorUnavailableError, GetTimeoutError) as error:
        raise AwayError(f"the job's process does not answer: {first_line(error)}") from None
    except RayActorError as error:
        raise GoneError(f"the job's process is gone: {cause(error)}") from None
    except RayError as error:
        raise JobFailedError(f"the job's process failed: {first_line(error)}") from None
    if isinstance(answer, RayzeroError):
        raise answer
    return answer


def on_head(read: Callable[..., T], *args: Any) -> T:
    """What a function says on the head's machine.

    Raises:
        GoneError: there is no head, or it does not answer.
    """
    if not ray.is_initialized():
        raise GoneError("the connection to the cluster is closed")
    if (node := _head()) is None:
        raise GoneError("the cluster has no head that could be asked")
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(read).options(num_cpus=0, scheduling_strategy=strategy)
    try:
        found: T = ray.get(task.remote(*args), timeout=HEAD_S)
    except RayError as error:
        raise GoneError(f"the cluster's head does not answer: {first_line(error)}") from None
    return found


def tell(actor: Any, method: str) -> None:
    """As `call`, but waits for nothing. May be called from a signal handler's thread."""
    getattr(actor, method).remote()


def _head() -> str | None:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return next(
        (one["NodeID"] for one in nodes if one["Alive"] and _HEAD in one["Resources"]), None
    )

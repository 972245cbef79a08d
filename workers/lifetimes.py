"""Lifetimes of a job's actors and placement groups.

They are detached: Ray ends none of them with the job's process, which is lost with the head and
comes back with it. Their names say whose they are, and by these they are found and ended: by the
job itself, by the next job of that name, by `rayzero stop`, and at last by each of the actors.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any

import ray
from ray import PlacementGroupID
from ray.exceptions import RayError
from ray.util import list_named_actors
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group_table,
    remove_placement_group,
)

NAMESPACE = "rayzero"
"""The namespace of named actors."""
VAULT = "vault-"
"""Begins what a vault is called among the actors of its run; its node's id follows."""
VAULT_ASKS = 60
"""Questions of a vault for its job's process in the time after which it is an orphan."""
WORKER_ASKS = 6  # of which there are more
_JOBS = "job-"
_RUNS = "rayzero"
_ROLE_END = ":"
_SURE = 2  # answers that the job has no process, before its actors are ended


def job_actor_name(job: str) -> str:
    return _JOBS + job


def job_of_actor(name: str) -> str | None:
    """The job whose process that actor is; None if it is none's."""
    return name.removeprefix(_JOBS) if name.startswith(_JOBS) else None


def owned_name(job: str, run: str, what: str) -> str:
    """The name of a worker, a vault or a placement group."""
    return f"{_RUNS}/{job}/{run}/{what}"


def name_in_run(role: str, name: str) -> str:
    """What a worker of a role, or the placement group for one, is called in its run; without a
    role, a rank's."""
    return f"{role}{_ROLE_END}{name}" if role else name


def role_of(what: str) -> str:
    """The role of what is called so; empty: it has none."""
    return what.rpartition(_ROLE_END)[0]


def index_of(what: str) -> int | None:
    """The index of the worker that is called so; None: it is no worker's name."""
    name = what.rpartition(_ROLE_END)[2]
    return int(name) if name.isdecimal() else None


@dataclass(frozen=True)
class Owned:
    """An actor or a placement group of a job, found by its name.

    Args:
        what: its name in its run.
        group: the id of a placement group; empty for an actor.
    """

    job: str
    run: str
    what: str
    group: str = ""

    def end(self) -> None:
        """Ends it, if it has not ended meanwhile."""
        if self.group:
            remove_placement_group(group_of_id(self.group))
        else:
            with suppress(ValueError):
                ray.kill(self.actor())

    def actor(self) -> Any:
        """Raises ValueError if it has ended."""
        return ray.get_actor(owned_name(self.job, self.run, self.what), namespace=NAMESPACE)


def group_of_id(group: str) -> PlacementGroup:
    return PlacementGroup(PlacementGroupID(bytes.fromhex(group)))


def parse_owned(name: str, group: str = "") -> Owned | None:
    """The owner and the kind that a name says; None if it is no job's."""
    space, *parts = name.split("/")
    if space != _RUNS or len(parts) != 3:
        return None
    job, run, what = parts
    return Owned(job, run, what, group)


def find_owned(job: str | None = None) -> list[Owned]:
    """The actors and placement groups of a job, or of all jobs, in the connected cluster: groups
    first. Blocks until the head answers."""
    groups = [
        (entry["name"], group_id)
        for group_id, entry in placement_group_table().items()
        if entry["state"] != "REMOVED"
    ]
    names: list[dict[str, str]] = list_named_actors(all_namespaces=True)
    actors = [(actor["name"], "") for actor in names if actor["namespace"] == NAMESPACE]
    found = [parse_owned(name, group_id) for name, group_id in groups + actors]
    return [owned for owned in found if owned is not None and job in (None, owned.job)]


def end_owned(job: str, run: str = "") -> list[Owned]:
    """Ends what a job owns, or one of its runs; returns what that was."""
    ended = [owned for owned in find_owned(job) if run in ("", owned.run)]
    for owned in ended:
        owned.end()
    return ended


def has_process(job: str) -> bool:
    """Whether a job has a process, or Ray is about to restart it. Blocks until the head answers."""
    try:
        ray.get_actor(job_actor_name(job), namespace=NAMESPACE)
    except ValueError:
        return False
    return True


class OrphanWatch:
    """Ends what a run owns, this process last, when the job has no process any more; and this
    process alone if the head has not answered for `orphan_s`. Created in an actor that has a name
    of `owned_name`. Owns the thread `rayzero-orphan`, which ends with the process.
    """

    def __init__(self, orphan_s: float, asks: int) -> None:
        """
        Args:
            orphan_s: 0: nobody watches.
            asks: questions in `orphan_s`.
        """
        self._orphan_s = orphan_s
        self._pause_s = orphan_s / asks
        own = parse_owned(ray.get_runtime_context().get_actor_name() or "") if orphan_s else None
        if own is not None:
            Thread(target=self._watch, args=[own], name="rayzero-orphan", daemon=True).start()

    def _watch(self, own: Owned) -> None:
        answered_s, missing = time.monotonic(), 0
        while missing < _SURE and time.monotonic() - answered_s < self._orphan_s:
            time.sleep(self._pause_s)
            with suppress(RayError):
                missing = 0 if has_process(own.job) else missing + 1
                answered_s = time.monotonic()
        if missing:
            with suppress(RayError):
                end_run(own)
        os.kill(os.getpid(), signal.SIGKILL)


def end_run(own: Owned) -> None:
    """Ends what the run of this actor owns, but the actor itself. Several may do this at once: who
    ends another one has removed all groups before, but the one that it is in itself."""
    group = get_current_placement_group()
    for owned in find_owned(own.job):
        is_own = owned == own or (group is not None and owned.group == group.id.hex())
        if owned.run == own.run and not is_own:
            owned.end()
    if group is not None:
        remove_placement_group(group)

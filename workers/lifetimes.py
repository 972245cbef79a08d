"""Lifetimes of a job's actors and placement groups.

The actors and groups are detached: Ray does not end them with the job's process, which is lost with
the head and restarted with it. Their names contain the job and the run. They are found by name, and
ended by the job itself, by the next job of that name, by `rayzero stop`, or as a last resort by
each of the actors.
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
"""Prefix of a vault's name in its run; the node's id follows."""
VAULT_ASKS = 60
"""How often a vault asks Ray for its job's process within `orphan_s`: see `OrphanWatch`."""
WORKER_ASKS = 6  # the same for a worker: less often, because there are more workers
_JOBS = "job-"
_RUNS = "rayzero"
_ROLE_END = ":"
_SURE = 2  # consecutive answers that the job has no process, before its actors are ended


def job_actor_name(job: str) -> str:
    return _JOBS + job


def job_of_actor(name: str) -> str | None:
    """Returns the job whose process the actor of that name is; None if it is no job's process."""
    return name.removeprefix(_JOBS) if name.startswith(_JOBS) else None


def owned_name(job: str, run: str, what: str) -> str:
    """Returns the full name of a worker, a vault or a placement group."""
    return f"{_RUNS}/{job}/{run}/{what}"


def name_in_run(role: str, name: str) -> str:
    """Returns the name in its run of a role's worker, or of the placement group for one. An empty
    role stands for a rank."""
    return f"{role}{_ROLE_END}{name}" if role else name


def role_of(what: str) -> str:
    """Returns the role in a name of `name_in_run`; empty for a rank."""
    return what.rpartition(_ROLE_END)[0]


def index_of(what: str) -> int | None:
    """Returns the index of the worker with that name in its run; None for another name."""
    name = what.rpartition(_ROLE_END)[2]
    return int(name) if name.isdecimal() else None


@dataclass(frozen=True)
class Owned:
    """An actor or a placement group of a job, found by its name.

    Args:
        what: the name in its run.
        group: the id of a placement group; empty for an actor.
    """

    job: str
    run: str
    what: str
    group: str = ""

    def end(self) -> None:
        """Ends the actor or group, if it has not ended meanwhile."""
        if self.group:
            remove_placement_group(group_of_id(self.group))
        else:
            with suppress(ValueError):
                ray.kill(self.actor())

    def actor(self) -> Any:
        """Returns a handle of the actor. Raises ValueError if the actor has ended."""
        return ray.get_actor(owned_name(self.job, self.run, self.what), namespace=NAMESPACE)


def group_of_id(group: str) -> PlacementGroup:
    return PlacementGroup(PlacementGroupID(bytes.fromhex(group)))


def parse_owned(name: str, group: str = "") -> Owned | None:
    """Parses a name of `owned_name`; returns None for any other name."""
    space, *parts = name.split("/")
    if space != _RUNS or len(parts) != 3:
        return None
    job, run, what = parts
    return Owned(job, run, what, group)


def find_owned(job: str | None = None) -> list[Owned]:
    """Returns the actors and placement groups of a job, or of all jobs, in the connected cluster,
    groups first. Blocks until the head answers."""
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
    """Ends the actors and groups of a job, or of one of its runs; returns these."""
    ended = [owned for owned in find_owned(job) if run in ("", owned.run)]
    for owned in ended:
        owned.end()
    return ended


def has_process(job: str) -> bool:
    """Returns whether a job has a process, or Ray is about to restart it. Blocks until the head
    answers."""
    try:
        ray.get_actor(job_actor_name(job), namespace=NAMESPACE)
    except ValueError:
        return False
    return True


class OrphanWatch:
    """Ends the actors and groups of a run, this process last, once the job has no process any more.
    Ends this process alone if the head has not answered for `orphan_s`. Created in an actor whose
    name is one of `owned_name`. Owns the thread `rayzero-orphan`, which ends with the process.
    """

    def __init__(self, orphan_s: float, asks: int) -> None:
        """
        Args:
            orphan_s: in seconds; 0: this process is not watched.
            asks: how often Ray is asked within `orphan_s`.
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
    """Ends the actors and groups of the run of this actor, except the actor itself. Several actors
    may do this at once: each ends other actors only after it has removed all groups but its own."""
    group = get_current_placement_group()
    for owned in find_owned(own.job):
        is_own = owned == own or (group is not None and owned.group == group.id.hex())
        if owned.run == own.run and not is_own:
            owned.end()
    if group is not None:
        remove_placement_group(group)

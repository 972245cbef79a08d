"""Orphans end themselves: when, and that whoever is ended meanwhile, nothing is left."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from rayzero.workers import lifetimes
from rayzero.workers.lifetimes import OrphanWatch, Owned, parse_owned

OWN = Owned("gpt", "7", "0")
RPC_LIMIT_S = 60.0  # after which a question to a lost head fails


@pytest.mark.parametrize("name", ["job-gpt", "rayzero/gpt/7", "other/gpt/7/0", "rayzero/a/b/c/d"])
def test_names_of_others_are_no_job_s(name: str) -> None:
    assert parse_owned(name) is None
    assert parse_owned(lifetimes.owned_name("gpt", "7", "0")) == OWN


@pytest.mark.parametrize(
    ("answers", "end_s", "ends_run"),
    [
        (lambda asked_s: asked_s < 300, 310, True),  # the second answer that there is none
        (lambda asked_s: asked_s != 300 and asked_s < 900, 910, True),  # one answer alone is none
        (lambda asked_s: asked_s < 300 or None, 290 + 600, False),  # the head is lost
        (lambda asked_s: (asked_s < 300 or asked_s > 800 or None) and asked_s < 2000, 2010, True),
    ],
)
def test_orphan_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
    answers: Callable[[float], bool | None],
    end_s: float,
    ends_run: bool,
) -> None:
    """`answers`: whether the job has a process, by time; None: no answer."""
    now_s = 0.0
    seen: list[Any] = []

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def has_process(job: str) -> bool:
        assert job == "gpt"
        if (answer := answers(now_s)) is None:
            sleep(RPC_LIMIT_S)
            raise GetTimeoutError
        return answer

    monkeypatch.setattr(lifetimes.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(lifetimes.time, "sleep", sleep)
    monkeypatch.setattr(lifetimes, "has_process", has_process)
    monkeypatch.setattr(lifetimes, "end_run", seen.append)
    monkeypatch.setattr(os, "kill", lambda *call: seen.append(call))
    watch = OrphanWatch(0.0, lifetimes.VAULT_ASKS)
    watch._orphan_s, watch._pause_s = 600.0, 600.0 / lifetimes.VAULT_ASKS
    watch._watch(OWN)
    assert seen == [OWN] * ends_run + [(os.getpid(), signal.SIGKILL)]
    assert end_s <= now_s <= end_s + 60


class Cluster:
    """Two workers, a vault and a reservation without a worker; who is ended runs no more."""

    def __init__(self, has_vault: bool) -> None:
        self.groups = {"g0": "0", "g1": "1", "spare": ""}
        self.actors = {"0", "1", *(["vault-n-1"] if has_vault else [])}

    def end(self, owned: Owned) -> None:
        if owned.group:
            self.actors.discard(self.groups.pop(owned.group, ""))
        self.actors.discard(owned.what)

    def found(self) -> list[Owned]:
        groups = [Owned("gpt", "7", group, group) for group in self.groups]
        return groups + [Owned("gpt", "7", actor) for actor in sorted(self.actors)]

    def ending(self, own: str) -> Iterator[None]:
        """`end_run` of an actor, and its own end, in steps between which others run."""
        groups = {worker: group for group, worker in self.groups.items()}
        targets: list[Owned] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lifetimes, "find_owned", lambda job: self.found())
            patch.setattr(Owned, "end", lambda owned: targets.append(owned))
            group = groups.get(own)
            patch.setattr(
                lifetimes, "get_current_placement_group", lambda: group and FakeGroup(group)
            )
            patch.setattr(
                lifetimes,
                "remove_placement_group",
                lambda it: targets.append(Owned("gpt", "7", it.name, it.name)),
            )
            lifetimes.end_run(Owned("gpt", "7", own))
        for target in targets:
            yield
            self.end(target)
        yield
        self.actors.discard(own)


class FakeGroup:
    def __init__(self, name: str) -> None:
        self.name = name
        self.id = self

    def hex(self) -> str:
        return self.name


def test_nothing_is_left_in_whatever_order_orphans_end_each_other() -> None:
    for seed in range(300):
        order, cluster = random.Random(seed), Cluster(has_vault=seed % 2 == 0)
        running: dict[str, Iterator[None]] = {}
        while cluster.actors:
            actor = order.choice(sorted(cluster.actors))
            if actor not in running:
                running[actor] = cluster.ending(actor)
            next(running[actor], None)
        assert not cluster.groups, seed

"""The workers of a job as Ray actors in a placement group."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayzero.orchestrator.clock import Clock
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.group import WorkerLostError
from rayzero.orchestrator.policies.placement import (
    Capacity,
    Need,
    could_hold,
    too_small,
    world_size,
)
from rayzero.workers.actor import COMMAND_THREADS, WorkerActor
from rayzero.workers.messages import Assign, Message, Setup, WorkerInfo

_CHECK_S = 0.1
_SETTLE_S = 5.0
"""How long to hope for more than the least number of workers."""
_GONE_S = 3.0
"""How long to wait for killed workers to be gone."""

_DETAIL = re.compile(r"Worker exit detail: (.*?)(?: Some common causes include|$)")

T = TypeVar("T")


class RayWorkerGroup:
    """Owns one placement group and the actors in it, from `place` to `release`."""

    def __init__(self, setup: Setup, clock: Clock, can_grow: bool) -> None:
        self._setup = setup
        self._clock = clock
        self._can_grow = can_grow
        self._reserved: PlacementGroup | None = None
        self._actors: list[Any] = []

    async def place(self, need: Need) -> tuple[WorkerInfo, ...]:
        group = await self._reserve(need)
        for index in range(group.bundle_count):
            self._actors.append(self._start(group, index))
        answers = asyncio.gather(*(actor.describe.remote() for actor in self._actors))
        try:
            return tuple(await asyncio.wait_for(answers, need.timeout_s))
        except TimeoutError:
            raise JobFailedError(
                f"the workers' processes did not answer within {need.timeout_s:g} s",
                fix="workers.start_timeout_s in the job file",
            ) from None
        except RayError as error:
            raise JobFailedError(f"a worker could not start: {_cause(error)}") from None

    async def open_store(self, worker: int) -> int:
        return int(await _answer(self._actors[worker].open_store.remote()))

    async def assign(self, worker: int, assign: Assign) -> None:
        await _answer(self._actors[worker].assign.remote(assign))

    async def poll(self, worker: int, timeout_s: float) -> list[Message]:
        messages: list[Message] = await _answer(self._actors[worker].poll.remote(timeout_s))
        return messages

    async def stop(self, worker: int) -> None:
        await _answer(self._actors[worker].stop.remote())

    async def release(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)
        if self._reserved is not None:
            remove_placement_group(self._reserved)
            self._reserved = None
        gone = [asyncio.ensure_future(_gone(actor)) for actor in actors]
        if gone:
            _, late = await asyncio.wait(gone, timeout=_GONE_S)
            for one in late:
                one.cancel()

    async def _reserve(self, need: Need) -> PlacementGroup:
        """Makes the placement group; first for as many workers as fit, then for the least."""
        nodes, free = _capacities()
        if not self._can_grow and could_hold(nodes, need) < need.least:
            raise too_small(nodes, free, need, waited_s=0)
        wanted = world_size(nodes, free, need)
        group = None
        if wanted > need.least:
            group = await self._created(wanted, need, _SETTLE_S)
        group = group or await self._created(need.least, need, need.timeout_s)
        if group is not None:
            return group
        raise too_small(*_capacities(), need, waited_s=need.timeout_s)

    async def _created(self, count: int, need: Need, timeout_s: float) -> PlacementGroup | None:
        """The group once it stands; None when it does not in time, and then it is removed."""
        bundle = {"CPU": need.cpus} | ({"GPU": need.gpus} if need.gpus else {})
        group: PlacementGroup = placement_group(
            [dict(bundle) for _ in range(count)], strategy="PACK"
        )
        self._reserved = group
        until = self._clock.now() + timeout_s
        while placement_group_table(group)["state"] != "CREATED":
            if self._clock.now() >= until:
                await self.release()
                return None
            await self._clock.sleep(_CHECK_S)
        return group

    def _start(self, group: PlacementGroup, index: int) -> Any:
        cpus, gpus = self._setup.cpus, self._setup.gpus
        actor = ray.remote(WorkerActor).options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_concurrency=COMMAND_THREADS,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(max(1, int(cpus)))}},
        )
        return actor.remote(self._setup, index)


async def _answer(reference: Awaitable[T]) -> T:
    try:
        return await reference
    except RayActorError as error:
        raise WorkerLostError(_cause(error)) from None


async def _gone(actor: Any) -> None:
    """Returns once a killed actor's process no longer answers."""
    try:
        while True:
            await actor.describe.remote()
            await asyncio.sleep(_CHECK_S)
    except RayError:
        return


def _cause(error: RayError) -> str:
    """What Ray knows about a death, without the identifiers and the advice around it."""
    text = " ".join(line for line in str(error).splitlines() if not line.startswith("\t"))
    found = _DETAIL.search(text)
    return found.group(1) if found else text


def _capacities() -> tuple[list[Capacity], Capacity]:
    """The nodes' resources, and what is free in the cluster as a whole."""
    nodes = [
        _capacity(node["Resources"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    return nodes, _capacity(free)


def _capacity(resources: dict[str, float]) -> Capacity:
    return Capacity(resources.get("CPU", 0.0), resources.get("GPU", 0.0))

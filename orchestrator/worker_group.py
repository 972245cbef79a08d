"""The workers of a job on Ray: each in a seat that is asked for, taken, and taken again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from rayzero.orchestrator import nodes
from rayzero.orchestrator.answers import Answers
from rayzero.orchestrator.clock import Clock
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.group import Heard, VaultLostError, WorkerLostError
from rayzero.orchestrator.lost import LOST, cause
from rayzero.orchestrator.policies.placement import Capacity, Need, could_hold, too_small
from rayzero.orchestrator.polls import Polls
from rayzero.orchestrator.roster import Roster, Worker
from rayzero.orchestrator.vault_group import RayVaultGroup
from rayzero.workers.actor import WorkerActor
from rayzero.workers.messages import Formation, Own, Setup, SlotInfo, WorkerInfo

_CHECK_S = 0.02
"""How often to look for seats while a job waits for them."""
_WATCH_S = 0.5
"""How often to look for seats that are to come behind a running job."""
_SETTLE_S = 1.0
"""How long to hope for one more seat when the least number stands."""
_KILL_S = 1.0
"""How long a vault may take to kill a process."""
_MANY = 64
"""Workers from which on what all of them are told goes through the object store."""

T = TypeVar("T")


class RayWorkerGroup:
    """Owns the seats and the workers in them, from `place` to `release`. Used from one event loop.

    An usher, one background task, puts a worker into every vacant seat as soon as it stands; it
    sleeps while no seat is vacant. Tasks end in `release`.

    Args:
        can_grow: whether more nodes may come; if not, no more seats are asked for than could fit.
        vaults: started where workers are, and asked to kill them.
        actor: the class of the workers.
    """

    def __init__(
        self,
        setup: Setup,
        clock: Clock,
        can_grow: bool,
        vaults: RayVaultGroup,
        actor: type[Any] = WorkerActor,
    ) -> None:
        self._clock = clock
        self._can_grow = can_grow
        self._vaults = vaults
        self._need = Need(1, 1, setup.cpus, setup.gpus, 0.0)  # until `place` says more
        self._roster = Roster(setup, clock, vaults, actor)
        self._polls = Polls(lambda worker, limit_s: self._actor(worker).poll.remote(limit_s))
        self._ready: asyncio.Queue[Worker | Exception] = asyncio.Queue()
        self._vacancy = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def place(self, need: Need) -> tuple[WorkerInfo, ...]:
        self._need = need
        await self._take_seats()
        first = self._roster.workers
        answers = asyncio.gather(*(self._first_answer(worker) for worker in first))
        try:
            await asyncio.wait_for(answers, need.timeout_s)
        except TimeoutError:
            raise JobFailedError(
                f"the workers' processes did not answer within {need.timeout_s:g} s",
                fix="workers.start_timeout_s in the job file",
            ) from None
        except RayError as error:
            raise JobFailedError(f"a worker could not start: {cause(error)}") from None
        stayed = [worker for worker in first if worker in self._roster]
        for worker in stayed:
            worker.known = True
        self._spawn(self._usher())
        return tuple(worker.info for worker in stayed if worker.info is not None)

    async def next_worker(self) -> WorkerInfo:
        while True:
            came = await self._ready.get()
            if isinstance(came, Exception):
                raise came
            if came in self._roster and came.info is not None:
                came.known = True
                return came.info

    def replace(self, worker: int, delay_s: float, avoid_nodes: Sequence[str]) -> None:
        lost = self._roster.get(worker)
        lost.seat.avoid = frozenset(avoid_nodes)
        self._roster.vacate(lost, delay_s)
        self._vacancy.set()

    def resize(self, least: int, most: int) -> None:
        now = self._need
        self._need = Need(least, most, now.cpus, now.gpus, now.timeout_s)
        self._spawn(self._fit(most))

    async def dismiss(self, worker: int) -> None:
        await self._roster.end([self._roster.get(worker)])

    async def kill(self, worker: int) -> None:
        """The vault kills in a millisecond, and then Ray sees by itself why its process ended: it
        would say that we killed it, also of one that had died. Ray alone asks first: a stopped
        process would live on for another 5 s."""
        victim = self._roster.get(worker)
        if victim.info is not None:
            with suppress(VaultLostError, TimeoutError):
                killed = self._vaults.kill(victim.info.node_id, victim.info.pid)
                if await asyncio.wait_for(killed, _KILL_S):
                    return
        ray.kill(victim.actor)

    async def open_store(self, worker: int) -> int:
        return int(await _answer(self._actor(worker).open_store.remote()))

    def assign(self, formation: Formation, places: Mapping[int, Own]) -> Answers:
        # With a thousand workers it holds a thousand slots: packed once, and fetched once a node.
        packed = formation if len(places) < _MANY else ray.put(formation)
        return self._polls.command(
            places, lambda worker: self._actor(worker).assign.remote(packed, places[worker])
        )

    def listen(self, workers: Iterable[int]) -> None:
        self._polls.listen(workers)

    async def hear(self) -> Heard:
        return await self._polls.hear()

    def stop(self, workers: Iterable[int], generation: int) -> Answers:
        return self._polls.command(workers, lambda one: self._actor(one).stop.remote(generation))

    def drain(self, workers: Iterable[int], generation: int) -> Answers:
        return self._polls.command(workers, lambda one: self._actor(one).drain.remote(generation))

    def fence(self, workers: Iterable[int], generation: int) -> Answers:
        return self._polls.command(workers, lambda one: self._actor(one).fence.remote(generation))

    async def inject(self, worker: int, faults: Sequence[str]) -> None:
        await _answer(self._actor(worker).inject.remote(tuple(faults)))

    async def salvage(self, worker: int, vault: str) -> SlotInfo:
        slot: SlotInfo = await _answer(self._actor(worker).salvage.remote(vault))
        return slot

    async def dump_stack(self, worker: int) -> str:
        return str(await _answer(self._actor(worker).dump_stack.remote()))

    async def leaving_nodes(self) -> frozenset[str]:
        leaving = await asyncio.to_thread(nodes.draining)
        doomed = [
            worker.seat
            for worker in self._roster.workers
            if worker.info and worker.info.node_id in leaving and not worker.seat.doomed
        ]
        if doomed and self._can_grow:
            for seat in doomed:
                seat.doomed = True
            await self._roster.seats.ask(len(doomed), self._need)
            self._vacancy.set()
        return leaving

    async def release(self) -> None:
        self._polls.close()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._roster.end(self._roster.workers)
        self._roster.seats.clear()

    async def _first_answer(self, worker: Worker) -> None:
        try:
            await self._roster.introduced(worker)
        except RayError:
            if worker in self._roster:  # else lower limits have dismissed it meanwhile
                raise

    async def _take_seats(self) -> None:
        """Asks for all seats and starts workers in those that come; returns when all came that
        there was room for, or after a while without another one."""
        need = self._need
        seen = await asyncio.to_thread(nodes.look)
        holds = could_hold(seen.capacities, need)
        if not self._can_grow and holds < need.least:
            raise too_small(seen.capacities, seen.all_free, need, waited_s=0)
        most = need.most if self._can_grow else min(need.most, holds)
        fits = sum(node.room(need) for node in seen.free.values())
        expected = min(fits, most) if fits >= need.least else most
        asked_s = came_s = self._clock.now()
        await self._roster.seats.ask(most, need)
        while len(self._roster) < min(expected, self._need.most):
            need = self._need  # the limits may change meanwhile
            if await self._roster.fill(need):
                came_s = self._clock.now()
                continue
            now_s, seated = self._clock.now(), len(self._roster)
            if seated >= need.least and now_s - came_s >= _SETTLE_S:
                return
            if seated < need.least and now_s - asked_s >= need.timeout_s:
                raise await self._too_small(seated)
            await self._clock.sleep(_CHECK_S)

    async def _too_small(self, seated: int) -> JobFailedError:
        """What we hold ourselves counts as free: it is what the job could have had."""
        seen = await asyncio.to_thread(nodes.look)
        need, free = self._need, seen.all_free
        ours = Capacity(free.cpus + seated * need.cpus, free.gpus + seated * need.gpus)
        await self.release()
        return too_small(seen.capacities, ours, need, waited_s=need.timeout_s)

    async def _usher(self) -> None:
        while True:
            if not self._roster.seats.vacant:
                self._vacancy.clear()
                await self._vacancy.wait()
            for worker in await self._roster.fill(self._need):
                self._spawn(self._introduce(worker))
            await self._clock.sleep(_WATCH_S)

    async def _introduce(self, worker: Worker) -> None:
        """Tells of a worker once it answers; one that does not start is tried again later."""
        limit_s = self._need.timeout_s
        try:
            await asyncio.wait_for(self._roster.introduced(worker), limit_s)
            self._ready.put_nowait(worker)
            return
        except TimeoutError:
            why = f"its process did not answer within {limit_s:g} s"
        except RayError as error:
            why = cause(error)
        if worker in self._roster:  # else it was dismissed meanwhile
            delay_s = self._roster.failed(worker)
            self._vacancy.set()
            self._ready.put_nowait(
                WorkerLostError(f"a worker did not start, the next try is in {delay_s:g} s: {why}")
            )

    async def _fit(self, most: int) -> None:
        """Asks for the seats that are missing, or gives back those that nobody knows of."""
        seats = self._roster.seats
        if not self._can_grow:
            seen = await asyncio.to_thread(nodes.look)
            most = min(most, could_hold(seen.capacities, self._need))
        if len(seats) < most:
            await seats.ask(most - len(seats), self._need)
            self._vacancy.set()
        for seat in seats.vacant[::-1][: max(0, len(seats) - most)]:
            seats.give_back(seat)
        unknown = [worker for worker in self._roster.workers[::-1] if not worker.known]
        await self._roster.end(unknown[: max(0, len(seats) - most)])

    def _actor(self, worker: int) -> Any:
        return self._roster.get(worker).actor

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # when it was cancelled before it began

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """What goes wrong behind the scenes is raised by `next_worker`."""
        try:
            await work
        except Exception as error:  # noqa: BLE001
            self._ready.put_nowait(error)


async def _answer(reference: Awaitable[T]) -> T:
    try:
        return await reference
    except LOST as error:
        raise WorkerLostError(cause(error)) from None

"""The buffer of rollouts: serves a `RolloutLedger` to generators and to the trainer's ranks.

A request is a JSON field [call, arguments], followed by the contents of prompts or samples, one in
each field. Its reply is a JSON object, followed by contents. The server holds a request that it
cannot answer yet, for as long as the request says. Only the server's thread uses the ledger.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from rayzero.engine.data.consumed import Consumed
from rayzero.engine.errors import DataError, RayzeroError
from rayzero.workers.authenticated import MessageServer
from rayzero.workers.rollouts.counts import RolloutCounts
from rayzero.workers.rollouts.ledger import RolloutLedger, RolloutPlan

T = TypeVar("T")
Reply = tuple[dict[str, Any], Sequence[bytes]]

ROLLOUTS_THREAD = "rayzero-rollouts"
_EXPIRY_S = 1.0
"""How often the server looks for expired leases while a request waits."""
_ASK_AGAIN_S = 5.0
"""Time after which another rank is asked for prompts that the first one has not sent."""
_ISSUED_AT_ONCE = 256


class _Request(NamedTuple):
    contents: list[bytes]
    is_lost: Callable[[], bool]  # returns whether the client has left, and gets no reply


class RolloutServer(MessageServer):
    """One buffer, from construction until `close`. Serves clients that know the secret of `admit`.
    Its arguments and errors are those of `MessageServer`. Any thread may call `publish`, `lose`,
    `counts`, `admit` and `close`."""

    def __init__(
        self,
        plan: RolloutPlan,
        address: str,
        timeout_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        # No lease of an earlier buffer may have the attempt of a lease of this one.
        self._ledger = RolloutLedger(plan, first_attempt=secrets.randbits(48))
        self._clock = clock
        self._expired_s = clock()
        self._changed = asyncio.Event()
        self._asked_stop = 0  # ranks were asked for the prompts below this number
        self._asked_until_s = 0.0
        self._wait_s = [0.0] * len(plan.lease_s)  # of workers for tasks, by stage
        self._calls: dict[str, Callable[..., Awaitable[Reply]]] = {
            "take": self._take,
            "done": self._done,
            "extend": self._extend,
            "open": self._open,
            "read": self._read,
            "consumed": self._consumed,
            "issue": self._issue,
        }
        super().__init__("the buffer of rollouts", ROLLOUTS_THREAD, address, timeout_s)

    def publish(self, generation: int, version: int) -> None:
        """See `RolloutLedger.publish`."""
        self.call_soon(partial(self._change, partial(self._ledger.publish, generation, version)))

    def lose(self, workers: Sequence[int]) -> None:
        """See `RolloutLedger.lose`."""
        self.call_soon(partial(self._change, partial(self._ledger.lose, workers)))

    def counts(self) -> RolloutCounts:
        """Returns the counts of the buffer. Raises TimeoutError if the server's thread does not
        answer within a quarter of `timeout_s`, which is also the controller's limit for a vault: so
        the vault answers the controller in time."""
        counts: Future[RolloutCounts] = Future()
        self.call_soon(
            lambda: counts.set_result(replace(self._ledger.counts(), wait_s=tuple(self._wait_s)))
        )
        return counts.result(self._timeout_s / 4)

    # The methods below run on the server's thread.

    async def answer(self, request: list[bytes], is_lost: Callable[[], bool]) -> list[bytes]:
        head, *contents = request
        call, arguments = json.loads(head)
        try:
            if call not in self._calls:
                raise DataError(f"rollout request {call!r}", f"one of {[*self._calls]}")
            reply, found = await self._calls[call](_Request(contents, is_lost), *arguments)
        except RayzeroError as error:
            reply, found = {"error": error.args}, []
        return [json.dumps(reply).encode(), *found]

    def _change(self, change: Callable[[], object]) -> None:
        change()
        self._wake()

    def _wake(self) -> None:
        """Makes the requests that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _when(
        self, request: _Request, find: Callable[[], T | None], limit_s: float
    ) -> T | None:
        """Waits until `find` returns something, and returns that. After the limit, returns the last
        result of `find`. Returns None if the client has left, and then does not call `find`, whose
        result would be lost."""
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + limit_s
        while True:
            self._expire()
            changed = self._changed
            found = None if request.is_lost() else find()
            left_s = until_s - now_s()
            if found or left_s <= 0:
                return found
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, _EXPIRY_S)):
                    await changed.wait()

    def _expire(self) -> None:
        now_s = self._clock()
        if now_s >= self._expired_s + _EXPIRY_S:
            self._expired_s = now_s
            if self._ledger.expire(now_s):
                self._wake()

    async def _take(
        self,
        request: _Request,
        stage: int,
        worker: int,
        count: int,
        held: list[int],
        limit_s: float,
    ) -> Reply:
        if self._ledger.keep(stage, worker, held):
            self._wake()
        since_s = self._clock()
        found = await self._when(
            request, lambda: self._ledger.take(stage, worker, count, self._clock()), limit_s
        )
        self._wait_s[stage] += self._clock() - since_s
        leases = found or []
        heads = [[lease.number, lease.attempt] for lease in leases]
        reply = {"leases": heads, "version": self._ledger.version}
        return reply, [content for lease in leases for content in (lease.prompt, *lease.content)]

    async def _done(self, request: _Request, leases: list[list[int]]) -> Reply:
        group = self._ledger.plan.group
        counted = [
            self._ledger.done(
                number, attempt, request.contents[place * group : (place + 1) * group]
            )
            for place, (number, attempt) in enumerate(leases)
        ]
        self._wake()
        return {"counted": counted}, []

    async def _extend(self, request: _Request, attempts: list[int]) -> Reply:
        self._ledger.extend(attempts, self._clock())
        return {}, []

    async def _open(
        self, request: _Request, generation: int, frontier: int, extras: list[int]
    ) -> Reply:
        consumed = Consumed(frontier, frozenset(extras))
        self._change(partial(self._ledger.open, generation, consumed))
        self._asked_stop = 0
        return {}, []

    async def _read(self, request: _Request, start: int, count: int, limit_s: float) -> Reply:
        """Replies with up to `count` samples from position `start`, counted in samples."""
        group = self._ledger.plan.group
        first, last = start // group, -(-(start + count) // group)
        reply = await self._when_ready(request, lambda: self._ledger.read(first, last), limit_s)
        entries = reply.pop("found") or []
        numbered = [
            (number * group + member, sample)
            for number, samples in entries
            for member, sample in enumerate(samples)
        ]
        skipped = start - first * group
        numbered = numbered[skipped : skipped + count]
        numbers = [number for number, _ in numbered]
        return reply | {"numbers": numbers}, [sample for _, sample in numbered]

    async def _consumed(self, request: _Request, position: int, limit_s: float) -> Reply:
        """Replies with the prompts before `position`, counted in samples."""
        place = position // self._ledger.plan.group
        reply = await self._when_ready(request, lambda: self._ledger.consumed_at(place), limit_s)
        consumed = reply.pop("found")
        if consumed is not None:
            reply |= {"frontier": consumed.frontier, "extras": sorted(consumed.extras)}
        return reply, []

    async def _when_ready(
        self, request: _Request, find: Callable[[], Any], limit_s: float
    ) -> dict[str, Any]:
        """Waits until `find` returns a result, or the trainer must send prompts. The reply has
        `found`, the result or None; `ready`, whether there is one; and `wanted`, the numbers of the
        prompts."""
        reply: dict[str, Any] = {}

        def look() -> bool:
            found, wanted = find(), self._unasked()
            reply.update(found=found, ready=found is not None, wanted=wanted)
            return found is not None or bool(wanted)

        await self._when(request, look, limit_s)
        return reply

    def _unasked(self) -> list[int]:
        """Returns the next prompts to issue, unless a rank was just asked for them."""
        now_s = self._clock()
        wanted = self._ledger.wanted()[:_ISSUED_AT_ONCE]
        if not wanted or (wanted[0] < self._asked_stop and now_s < self._asked_until_s):
            return []
        self._asked_stop = wanted[-1] + 1
        self._asked_until_s = now_s + _ASK_AGAIN_S
        return wanted

    async def _issue(self, request: _Request, numbers: list[int]) -> Reply:
        for number, prompt in zip(numbers, request.contents, strict=True):
            self._ledger.issue(number, prompt)
        self._wake()
        return {}, []

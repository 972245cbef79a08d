"""Calls that wait for the cluster's head, without a cluster."""

from __future__ import annotations

import asyncio
from threading import Event

from ray.exceptions import GetTimeoutError

from rayzero.orchestrator.cluster.head_calls import HeadCalls

LIMIT_S = 30.0


async def test_event_loop_runs_while_the_head_is_away_and_calls_keep_their_order():
    head, is_back, made = HeadCalls(), Event(), list[str]()

    def first() -> str:
        assert is_back.wait(LIMIT_S)
        made.append("first")
        return "answer"

    asking = asyncio.ensure_future(head(first))
    await asyncio.sleep(0)
    head.post(made.append, "posted")
    await head.settle(0.01)  # which runs only if nothing blocks the event loop
    assert not asking.done()
    assert made == []
    is_back.set()
    assert await asyncio.wait_for(asking, LIMIT_S) == "answer"
    await head.settle(LIMIT_S)
    assert made == ["first", "posted"]


async def test_call_that_ray_gives_up_is_made_again_and_a_cancelled_one_holds_nothing_up():
    head, is_back, attempts = HeadCalls(), Event(), list[int]()

    def remove(group: int) -> int:
        attempts.append(group)
        if len(attempts) < 3:
            raise GetTimeoutError("GCS server is dead")
        assert is_back.wait(LIMIT_S)
        return group

    asking, dropped = asyncio.ensure_future(head(remove, 7)), asyncio.ensure_future(head(remove, 8))
    await asyncio.sleep(0)
    dropped.cancel()
    await asyncio.wait([dropped])
    is_back.set()
    assert await asyncio.wait_for(asking, LIMIT_S) == 7
    await head.settle(LIMIT_S)
    assert attempts == [7, 7, 7]

"""The feed: everyone gets everything at its own pace, and who is too slow is told."""

from __future__ import annotations

import asyncio

import pytest

from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.job import recorder as feed_module
from rayzero.orchestrator.job.recorder import LATEST, EventBuffer
from rayzero.orchestrator.job_events import JobWarning, StateEntered
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.results import EndedJob, JobStatus


def test_pages_in_order_and_the_end_behind_the_last(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(feed_module, "MAX_PAGE_EVENTS", 3)

    async def play() -> None:
        feed = EventBuffer()
        for number in range(7):
            feed.on_event(JobWarning(str(number)))
        feed.finish(EndedJob(JobStatus("job", State.STOPPED), JobStoppedError("s")))
        texts, since, pages = [], 0, 0
        while True:
            news = await feed.fetch_since(feed.run, since, 1.0)
            texts += [one.text for one in news.events if isinstance(one, JobWarning)]
            since, pages = news.next_index, pages + 1
            if news.ended is not None:
                break
        assert (texts, pages) == ([str(number) for number in range(7)], 3)

    asyncio.run(play())


def test_a_slow_follower_is_told_what_it_missed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(feed_module, "MAX_BUFFERED_EVENTS", 4)

    async def play() -> None:
        feed = EventBuffer()
        for number in range(10):
            feed.on_event(JobWarning(str(number)))
        news = await feed.fetch_since("", 1, 1.0)
        assert (news.dropped, [one.text for one in news.events]) == (5, ["6", "7", "8", "9"])
        assert (await feed.fetch_since("another process", 99, 1.0)).dropped == 6

    asyncio.run(play())


def test_who_comes_late_hears_the_state_and_what_is_to_come():
    async def play() -> None:
        feed = EventBuffer()
        for state in (State.STARTING, State.RUNNING):
            feed.on_event(StateEntered(state, 1, 2))
        feed.on_event(JobWarning("old"))
        news = await feed.fetch_since("", LATEST, 1.0)
        assert news.events == (StateEntered(State.RUNNING, 1, 2),)
        waiting = asyncio.ensure_future(feed.fetch_since(news.run, news.next_index, 5.0))
        await asyncio.sleep(0)
        feed.on_event(JobWarning("new"))
        assert (await waiting).events == (JobWarning("new"),)
        assert (await feed.fetch_since(news.run, news.next_index + 1, 0.01)).events == ()

    asyncio.run(play())

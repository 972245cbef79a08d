"""The feed: everyone gets everything at its own pace, and who is too slow is told."""

from __future__ import annotations

import asyncio

import pytest

from rayzero.orchestrator.head import feed as feed_module
from rayzero.orchestrator.head.feed import FROM_NOW, Feed
from rayzero.orchestrator.head.outcome import Ended
from rayzero.orchestrator.notices import StateEntered, Warned
from rayzero.orchestrator.states import State


def test_pages_in_order_and_the_end_behind_the_last(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(feed_module, "PAGE", 3)

    async def play() -> None:
        feed = Feed()
        for number in range(7):
            feed.see(Warned(str(number)))
        feed.end(Ended())
        texts, since, pages = [], 0, 0
        while True:
            news = await feed.news(feed.run, since, 1.0)
            texts += [one.text for one in news.notices if isinstance(one, Warned)]
            since, pages = news.upto, pages + 1
            if news.ended is not None:
                break
        assert (texts, pages) == ([str(number) for number in range(7)], 3)

    asyncio.run(play())


def test_a_slow_follower_is_told_what_it_missed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(feed_module, "KEPT", 4)

    async def play() -> None:
        feed = Feed()
        for number in range(10):
            feed.see(Warned(str(number)))
        news = await feed.news("", 1, 1.0)
        assert (news.missed, [one.text for one in news.notices]) == (5, ["6", "7", "8", "9"])
        assert (await feed.news("another process", 99, 1.0)).missed == 6

    asyncio.run(play())


def test_who_comes_late_hears_the_state_and_what_is_to_come():
    async def play() -> None:
        feed = Feed()
        for state in (State.STARTING, State.RUNNING):
            feed.see(StateEntered(state, 1, 2))
        feed.see(Warned("old"))
        news = await feed.news("", FROM_NOW, 1.0)
        assert news.notices == (StateEntered(State.RUNNING, 1, 2),)
        waiting = asyncio.ensure_future(feed.news(news.run, news.upto, 5.0))
        await asyncio.sleep(0)
        feed.see(Warned("new"))
        assert (await waiting).notices == (Warned("new"),)
        assert (await feed.news(news.run, news.upto + 1, 0.01)).notices == ()

    asyncio.run(play())

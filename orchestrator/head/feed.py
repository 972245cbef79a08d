"""A job's notices, numbered and kept for a while: who follows it fetches them at its own pace."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque

from rayzero.orchestrator.bell import Bell
from rayzero.orchestrator.head.outcome import Ended, News
from rayzero.orchestrator.notices import Notice, StateEntered
from rayzero.orchestrator.progress import StepRecord

KEPT = 10_000
"""Notices that are kept; a follower that is further behind than that misses some, and is told."""
PAGE = 500
"""Notices in one answer."""
GATHER_S = 0.02
"""How long an answer waits for what comes at about the same time."""
FROM_NOW = -1
"""Asks for what comes, behind the newest state and step."""


class Feed:
    """An Observer that nobody can slow down. Used from one event loop."""

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)
        self.ended: Ended | None = None
        self._kept: deque[Notice] = deque(maxlen=KEPT)
        self._count = 0
        self._newest: dict[type[Notice], Notice] = {}
        self._bell = Bell()

    def see(self, notice: Notice) -> None:
        self._kept.append(notice)
        self._count += 1
        if isinstance(notice, StateEntered | StepRecord):
            self._newest[type(notice)] = notice
        self._bell.ring()

    def end(self, ended: Ended) -> None:
        """Nothing comes after this."""
        self.ended = ended
        self._bell.ring()

    async def news(self, run: str, since: int, timeout_s: float) -> News:
        """What came after the notice of that number; waits so long for something to come.

        Args:
            run: whose numbers they are; those of another process mean nothing here.
            since: 0 for all that is kept, or FROM_NOW.
        """
        if since == FROM_NOW:
            return News(self.run, tuple(self._newest.values()), self._count, ended=self.ended)
        since = since if run in ("", self.run) else 0
        try:
            async with asyncio.timeout(timeout_s):
                await self._bell.until(lambda: self._count > since or self.ended is not None)
        except TimeoutError:
            pass
        else:
            if self.ended is None:
                await asyncio.sleep(GATHER_S)
        return self._page(since)

    def _page(self, since: int) -> News:
        first = self._count - len(self._kept)
        begin = max(since, first)
        page = tuple(self._kept)[begin - first : begin - first + PAGE]
        upto = begin + len(page)
        ended = self.ended if upto == self._count else None
        return News(self.run, page, upto, begin - since, ended)

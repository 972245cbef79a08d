"""A bell for those who wait for news, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Bell:
    """Rung whenever something changed that somebody may be waiting for."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for one in waiting:
            if not one.done():
                one.set_result(None)

    async def until(self, so: Callable[[], bool]) -> None:
        """Returns once `so()` holds; asks at once, and again at every ring."""
        while not so():
            rung = asyncio.get_running_loop().create_future()
            self._waiting.add(rung)
            try:
                await rung
            finally:
                self._waiting.discard(rung)

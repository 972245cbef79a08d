"""Time as the controller sees it, so that a test can turn it by hand."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds; only differences mean anything."""

    async def sleep(self, seconds: float) -> None:
        """Returns after that long. Can be cancelled."""


class SystemClock:
    """The real one."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

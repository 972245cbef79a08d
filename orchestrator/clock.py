"""Time as the controller sees it, so that a test can turn it by hand."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds; only differences mean anything."""

    async def sleep(self, seconds: float) -> None:
        """Returns after that long. Can be cancelled."""

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[Any]:
        """A block that raises TimeoutError when it takes longer; what it awaits is cancelled."""


class SystemClock:
    """The real one."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[Any]:
        return asyncio.timeout(seconds)

"""Makes calls to the cluster's head in a thread, so that they do not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar, TypeVarTuple

from ray.exceptions import GetTimeoutError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class HeadCalls:
    """Makes calls one after the other in the thread `rayzero-head`. While the head is away only
    this thread waits for it, not the event loop or other threads. Once this object is deleted, the
    thread ends after its current call.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "rayzero-head")

    async def __call__(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """Makes a call, and returns its result. If this is cancelled while the call is being made,
        the call is completed and its result dropped."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, _answer, call, *args)

    def post(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """Makes a call after all earlier ones, without waiting for it. Ignores errors."""
        self._thread.submit(partial(_answer, call, *args))

    async def settle(self, limit_s: float) -> None:
        """Waits until all calls so far are answered, for at most `limit_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self(bool), limit_s)


def _answer(call: Callable[[*Ts], T], *args: *Ts) -> T:
    """Makes a call, and repeats it if Ray gives up, as it does for some calls after 60 s without a
    head. The head may have received the call. So a call that creates something must find what an
    earlier attempt has created."""
    while True:
        with suppress(GetTimeoutError):
            return call(*args)

"""Calls that only the cluster's head answers, off the event loop."""

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
    """Makes calls one after the other in the thread `rayzero-head`: while the head is away they
    wait for it, and neither the event loop nor what runs in other threads waits with them. The
    thread ends with this object, once a call that it makes is answered.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "rayzero-head")

    async def __call__(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """The answer. May be cancelled; a call that is being made is then completed, and its answer
        is dropped."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, _answer, call, *args)

    def post(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """Makes a call after those before it, without waiting for it. Errors are ignored."""
        self._thread.submit(partial(_answer, call, *args))

    async def settle(self, limit_s: float) -> None:
        """Waits until all calls so far are answered, or the limit."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self(bool), limit_s)


def _answer(call: Callable[[*Ts], T], *args: *Ts) -> T:
    """Repeats a call that Ray gives up, as some after 60 s without a head. The head may have
    received it, so one that makes something must find what a previous attempt has made."""
    while True:
        with suppress(GetTimeoutError):
            return call(*args)

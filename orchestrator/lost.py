"""How Ray tells that an actor's process is gone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Any

from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    RayActorError,
    RayError,
)

LOST = (RayActorError, ActorUnschedulableError, ActorPlacementGroupRemoved)
"""What a call to an actor raises whose process or node is gone, or cannot be reached."""

_GONE_S = 3.0
"""How long to wait for killed processes to be gone."""
_CHECK_S = 0.05

_DETAIL = re.compile(r"Worker exit detail: (.*?)(?: Some common causes include|$)")


def cause(error: RayError) -> str:
    """What Ray knows about a death, without the identifiers and the advice around it."""
    text = " ".join(line for line in str(error).splitlines() if not line.startswith("\t"))
    found = _DETAIL.search(text)
    return found.group(1) if found else text


async def gone(methods: Iterable[Any]) -> None:
    """Returns when none of some killed actors answers any more, or after a while.

    Args:
        methods: a harmless one of each actor.
    """
    waits = [asyncio.ensure_future(_silent(method)) for method in methods]
    if waits:
        _, late = await asyncio.wait(waits, timeout=_GONE_S)
        for one in late:
            one.cancel()


async def _silent(method: Any) -> None:
    try:
        while True:
            await method.remote()
            await asyncio.sleep(_CHECK_S)
    except RayError:
        return

"""How a folder is taken where nothing can be created atomically: claim, look, wait, hold. Pure.

Everybody writes a claim of their own and then looks. Of two who ask at once, at least one sees the
other's claim, because both write before they look. The one with the greater id takes its claim back
and begins anew; the other waits until it has, or holds the folder because it had looked before. So
at most one comes to hold it, in any store that shows what was written before.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TypeAlias

from rayzero.orchestrator.lease.claim import Claim, Rival, Verdict, judge

POLL_S = 0.5
"""Between two looks."""


@dataclass(frozen=True)
class Put:
    """Writes the claim."""

    claim: Claim


@dataclass(frozen=True)
class Drop:
    """Removes a claim."""

    id: str


@dataclass(frozen=True)
class Look:
    """Answered with the claims of all others."""


@dataclass(frozen=True)
class Pause:
    """Lets time pass, because of a rival."""

    rival: Claim


Operation: TypeAlias = Put | Drop | Look | Pause
Asking: TypeAlias = Generator[Operation, tuple[Rival, ...], Claim]
"""Ends with the claim that holds the folder: one's own, or a rival's."""


def asking(me: Claim) -> Asking:
    """Asks for the folder until it is somebody's."""
    while True:
        yield Put(me)
        rivals = yield Look()
        judged = [(judge(one, me), one.claim) for one in rivals]
        by_verdict = dict(judged)
        if (holder := by_verdict.get(Verdict.HELD)) is not None:
            yield Drop(me.id)
            return holder
        if (first := by_verdict.get(Verdict.YIELD)) is not None:
            yield Drop(me.id)
            yield Pause(first)
        elif (open_ := by_verdict.get(Verdict.WAIT)) is not None:
            yield Pause(open_)
            me = replace(me, beat=me.beat + 1)
        else:
            epoch = max((claim.epoch for _, claim in judged), default=0) + 1
            me = replace(me, holds=True, epoch=epoch)
            yield Put(me)
            for _, lost in judged:  # not before: the next one is to see their epochs
                yield Drop(lost.id)
            return me

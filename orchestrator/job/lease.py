"""Claims and acquire protocol (pure).

A claim on a job's folder, and what to think of others. Pure but for `here` and `is_gone`.

How a folder is taken where nothing can be created atomically: claim, look, wait, hold. Pure.

Everybody writes a claim of their own and then looks. Of two who ask at once, at least one sees the
other's claim, because both write before they look. The one with the greater id takes its claim back
and begins anew; the other waits until it has, or holds the folder because it had looked before. So
at most one comes to hold it, in any store that shows what was written before.

Whose a job's folder is: a claim in it, renewed while its controller lives.

`protocol` and `claim` are pure; `folder` knows stores, `holding` has the thread.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any, TypeAlias

RENEWALS_PER_LEASE = 4
"""Renewals in the time of a lease: so many but one may fail."""


CLOCK_SLACK_S = 3.0
"""What the clock of a store may be coarse by."""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, so that others on its host can tell whether it lives.

    Args:
        boot: of the host's kernel.
        space: in which the number means it.
        started: in ticks since the boot; numbers are used again.
    """

    host: str
    boot: str
    space: str
    pid: int
    started: int


@dataclass(frozen=True)
class Claim:
    """What one controller has in the folder.

    Args:
        id: of the claim; random.
        job: the name.
        holds: whether the folder is its; it only asks for it before.
        epoch: grows with every holder.
        beat: grows with every renewal.
        lease_s: without a renewal for so long it counts as lost.
    """

    id: str
    job: str
    process: ProcessIdentity
    lease_s: float
    holds: bool = False
    epoch: int = 0
    beat: int = 0

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, content: bytes) -> Claim | None:
        """None for what is none."""
        try:
            found: dict[str, Any] = json.loads(content)
            return cls(**{**found, "process": ProcessIdentity(**found["process"])})
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class OtherClaim:
    """Somebody else's claim as it was found.

    Args:
        gone: whether its process is; None when that cannot be told from here.
        changed: whether it was renewed since it was first seen.
        watched_s: since it was first seen, or last changed.
        age_s: since it was written, by the store's clock.
    """

    claim: Claim
    process_gone: bool | None
    renewed: bool
    observed_s: float
    age_s: float


class ClaimState(Enum):
    LOST = auto()
    HELD = auto()
    UNDECIDED = auto()
    """It will be known soon."""
    BACK_OFF = auto()
    """It asks, too, and comes first."""


def classify_claim(rival: OtherClaim, me: Claim) -> ClaimState:
    """What to think of a rival while one asks."""
    claim = rival.claim
    silent = rival.age_s > claim.lease_s + CLOCK_SLACK_S
    silent = silent or (rival.observed_s > claim.lease_s and not rival.renewed)
    if rival.process_gone or (rival.process_gone is None and silent):
        return ClaimState.LOST
    if claim.holds:
        return (
            ClaimState.HELD
            if rival.process_gone is False or rival.renewed
            else ClaimState.UNDECIDED
        )
    return ClaimState.UNDECIDED if me.id < claim.id else ClaimState.BACK_OFF


def this_process() -> ProcessIdentity:
    """This process."""
    pid = os.getpid()
    return ProcessIdentity(
        socket.gethostname(), _boot_id(), _pid_namespace(), pid, _start_ticks(pid) or 0
    )


def is_process_gone(process: ProcessIdentity) -> bool | None:
    """Whether a process is; None for one of another host, or in a container of its own."""
    if (process.boot, process.space) != (_boot_id(), _pid_namespace()):
        return None
    return _start_ticks(process.pid) != process.started


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _start_ticks(pid: int) -> int | None:
    """None when it does not run, or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


CLAIM_POLL_S = 0.5
"""Between two looks."""


@dataclass(frozen=True)
class WriteClaim:
    """Writes the claim."""

    claim: Claim


@dataclass(frozen=True)
class DeleteClaim:
    """Removes a claim."""

    id: str


@dataclass(frozen=True)
class ListClaims:
    """Answered with the claims of all others."""


@dataclass(frozen=True)
class Sleep:
    """Lets time pass, because of a rival."""

    blocking_claim: Claim


LeaseOperation: TypeAlias = WriteClaim | DeleteClaim | ListClaims | Sleep


AcquireProtocol: TypeAlias = Generator[LeaseOperation, tuple[OtherClaim, ...], Claim]
"""Ends with the claim that holds the folder: one's own, or a rival's."""


def acquire(me: Claim) -> AcquireProtocol:
    """Asks for the folder until it is somebody's."""
    while True:
        yield WriteClaim(me)
        rivals = yield ListClaims()
        judged = [(classify_claim(one, me), one.claim) for one in rivals]
        by_verdict = dict(judged)
        if (holder := by_verdict.get(ClaimState.HELD)) is not None:
            yield DeleteClaim(me.id)
            return holder
        if (first := by_verdict.get(ClaimState.BACK_OFF)) is not None:
            yield DeleteClaim(me.id)
            yield Sleep(first)
        elif (open_ := by_verdict.get(ClaimState.UNDECIDED)) is not None:
            yield Sleep(open_)
            me = replace(me, beat=me.beat + 1)
        else:
            epoch = max((claim.epoch for _, claim in judged), default=0) + 1
            me = replace(me, holds=True, epoch=epoch)
            yield WriteClaim(me)
            for _, lost in judged:  # not before: the next one is to see their epochs
                yield DeleteClaim(lost.id)
            return me

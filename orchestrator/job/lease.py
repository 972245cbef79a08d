"""The lease of a job's folder: an exclusive lock of claim files, renewed by its holder. Pure.

Each process writes a claim of its own and then lists all claims. Of two that acquire at once, at
least one sees the other's claim, because both write before they list. The one with the greater id
deletes its claim and starts again; the other one waits until it has, or holds the folder because it
had listed before. So there is at most one holder, in any store with read-after-write consistency.
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
"""Renewals during the time of a lease; all but one of them may fail."""


CLOCK_SLACK_S = 3.0
"""Resolution of a store's timestamps, at worst."""


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process for other processes on its host.

    Args:
        boot: boot id of the host's kernel.
        space: PID namespace.
        started: clock ticks since the boot, because PIDs are reused.
    """

    host: str
    boot: str
    space: str
    pid: int
    started: int


@dataclass(frozen=True)
class Claim:
    """One controller's claim file.

    Args:
        id: random.
        job: the job's name.
        holds: True once the lease is acquired.
        epoch: increases with every holder.
        beat: increases with every renewal.
        lease_s: a claim without a renewal for this long is lost.
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
        """None if the content is not a claim."""
        try:
            document: dict[str, Any] = json.loads(content)
            return cls(**{**document, "process": ProcessIdentity(**document["process"])})
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class OtherClaim:
    """An observation of another process's claim.

    Args:
        process_gone: its process has ended; None when this host cannot know.
        renewed: it was renewed since it was first seen.
        observed_s: since it was first seen, or last changed.
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
    """Not known yet."""
    BACK_OFF = auto()
    """The other process acquires, too, and has the smaller id."""


def classify_claim(other: OtherClaim, own: Claim) -> ClaimState:
    """The state of another claim, for a process that acquires."""
    claim = other.claim
    expired = other.age_s > claim.lease_s + CLOCK_SLACK_S
    expired = expired or (other.observed_s > claim.lease_s and not other.renewed)
    if other.process_gone or (other.process_gone is None and expired):
        return ClaimState.LOST
    if claim.holds:
        return (
            ClaimState.HELD
            if other.process_gone is False or other.renewed
            else ClaimState.UNDECIDED
        )
    return ClaimState.UNDECIDED if own.id < claim.id else ClaimState.BACK_OFF


def this_process() -> ProcessIdentity:
    pid = os.getpid()
    return ProcessIdentity(
        socket.gethostname(), _boot_id(), _pid_namespace(), pid, _start_ticks(pid) or 0
    )


def is_process_gone(process: ProcessIdentity) -> bool | None:
    """True if the process has ended; None if it runs on another host or in another PID
    namespace."""
    if (process.boot, process.space) != (_boot_id(), _pid_namespace()):
        return None
    return _start_ticks(process.pid) != process.started


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _start_ticks(pid: int) -> int | None:
    """None if the process does not run, or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


CLAIM_POLL_S = 0.5
"""Pause between two lists of the claims."""


@dataclass(frozen=True)
class WriteClaim:
    """Write this claim."""

    claim: Claim


@dataclass(frozen=True)
class DeleteClaim:
    """Delete a claim."""

    id: str


@dataclass(frozen=True)
class ListClaims:
    """Answered with the claims of all other processes."""


@dataclass(frozen=True)
class Sleep:
    """Wait because of another claim."""

    blocking_claim: Claim


LeaseOperation: TypeAlias = WriteClaim | DeleteClaim | ListClaims | Sleep


AcquireProtocol: TypeAlias = Generator[LeaseOperation, tuple[OtherClaim, ...], Claim]
"""Returns the claim that holds the folder: its own, or another one."""


def acquire(own: Claim) -> AcquireProtocol:
    """Acquires the folder, unless another process holds it."""
    while True:
        yield WriteClaim(own)
        others = yield ListClaims()
        classified = [(classify_claim(other, own), other.claim) for other in others]
        by_state = dict(classified)
        if (holder := by_state.get(ClaimState.HELD)) is not None:
            yield DeleteClaim(own.id)
            return holder
        if (first := by_state.get(ClaimState.BACK_OFF)) is not None:
            yield DeleteClaim(own.id)
            yield Sleep(first)
        elif (undecided := by_state.get(ClaimState.UNDECIDED)) is not None:
            yield Sleep(undecided)
            own = replace(own, beat=own.beat + 1)
        else:
            epoch = max((claim.epoch for _, claim in classified), default=0) + 1
            own = replace(own, holds=True, epoch=epoch)
            yield WriteClaim(own)
            for _, lost in classified:  # last, so that the next process sees their epochs
                yield DeleteClaim(lost.id)
            return own

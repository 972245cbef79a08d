"""A claim on a job's folder, and what to think of others. Pure but for `here` and `is_gone`."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

RENEWALS = 4
"""Renewals in the time of a lease: so many but one may fail."""
SLACK_S = 3.0
"""What the clock of a store may be coarse by."""


@dataclass(frozen=True)
class Process:
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
    process: Process
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
            return cls(**{**found, "process": Process(**found["process"])})
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class Rival:
    """Somebody else's claim as it was found.

    Args:
        gone: whether its process is; None when that cannot be told from here.
        changed: whether it was renewed since it was first seen.
        watched_s: since it was first seen, or last changed.
        age_s: since it was written, by the store's clock.
    """

    claim: Claim
    gone: bool | None
    changed: bool
    watched_s: float
    age_s: float


class Verdict(Enum):
    LOST = auto()
    HELD = auto()
    WAIT = auto()
    """It will be known soon."""
    YIELD = auto()
    """It asks, too, and comes first."""


def judge(rival: Rival, me: Claim) -> Verdict:
    """What to think of a rival while one asks."""
    claim = rival.claim
    silent = rival.age_s > claim.lease_s + SLACK_S
    silent = silent or (rival.watched_s > claim.lease_s and not rival.changed)
    if rival.gone or (rival.gone is None and silent):
        return Verdict.LOST
    if claim.holds:
        return Verdict.HELD if rival.gone is False or rival.changed else Verdict.WAIT
    return Verdict.WAIT if me.id < claim.id else Verdict.YIELD


def here() -> Process:
    """This process."""
    pid = os.getpid()
    return Process(socket.gethostname(), _boot(), _space(), pid, _started(pid) or 0)


def is_gone(process: Process) -> bool | None:
    """Whether a process is; None for one of another host, or in a container of its own."""
    if (process.boot, process.space) != (_boot(), _space()):
        return None
    return _started(process.pid) != process.started


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _space() -> str:
    return os.readlink("/proc/self/ns/pid")


def _started(pid: int) -> int | None:
    """None when it does not run, or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])

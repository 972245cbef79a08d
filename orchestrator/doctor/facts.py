"""What the doctor looks at, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How bad a finding is: nothing, a job may suffer, a job cannot run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Args:
        seen: what was found, with numbers.
        fix: what to change, where something is wrong.
    """

    name: str
    level: Level
    seen: str
    fix: str = ""


@dataclass(frozen=True)
class Probe:
    """What a process that asked something said.

    Args:
        told: what it found out, also if it then failed.
        trouble: why it did not come to its end; empty if it did.
    """

    told: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""


@dataclass(frozen=True)
class Machine:
    """What can be asked without a process of its own.

    Args:
        python: of this interpreter, as (3, 11, 7).
        ray: its version; empty if it is not installed.
        shm_bytes: size of /dev/shm; None if there is none.
        memfd_trouble: why shared memory without a name cannot be made; empty if it can.
        open_files: how many this process may have open, and how many it may allow itself.
        stray_token: a Ray token in the home folder turns authentication on, unasked.
    """

    python: tuple[int, int, int]
    ray: str
    shm_bytes: int | None
    memfd_trouble: str
    open_files: tuple[int, int]
    stray_token: bool


@dataclass(frozen=True)
class Facts:
    """All that is judged.

    Args:
        torch: of the first of two processes.
        cluster: of the cluster at `address`; None without an address.
        storage: of the place for checkpoints, `place`.
    """

    machine: Machine
    torch: Probe
    cluster: Probe | None
    storage: Probe
    address: str
    place: str

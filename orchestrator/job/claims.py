"""Claims on a job's folder: one file for each process that holds the folder or acquires it."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.store import join_url, open_store
from rayzero.orchestrator.spec import MAX_LEASE_S

LEASE_FOLDER = "lease"
CLOCK_SLACK_S = 3.0  # resolution of a store's timestamps, at worst
_CLAIM_FILE_NAME = re.compile(r"([0-9a-f]{16})\.json")


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process for other processes on its host.

    Args:
        boot: boot id of the host's kernel.
        space: PID namespace.
        started: start of the process in clock ticks since the boot, because PIDs are reused.
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
        holds: True once the lease is acquired.
        epoch: increases with every holder.
        beat: increases with every renewal.
        lease_s: a claim without a renewal for this long is lost. A file with a value beyond the
            limits is ignored, because nobody would wait for the end of such a claim.
    """

    id: str
    job: str
    process: ProcessIdentity
    lease_s: Annotated[float, Field(ge=1, le=MAX_LEASE_S)]
    holds: bool = False
    epoch: int = 0
    beat: int = 0


def new_claim(job: str, lease_s: float) -> Claim:
    """Returns the claim of a process that is about to acquire a folder."""
    return Claim(secrets.token_hex(8), job, this_process(), lease_s)


CLAIM_FORMAT = TypeAdapter(Claim)  # reads and writes claim files, which are JSON


@dataclass(frozen=True)
class OtherClaim:
    """An observation of another process's claim.

    Args:
        process_gone: the claim's process has ended; None if this host cannot know.
        renewed: the claim was renewed since this process first saw it.
        observed_s: time since this process first saw the claim, or saw it change.
        age_s: time since the claim was written, by the store's clock.
    """

    claim: Claim
    process_gone: bool | None
    renewed: bool
    observed_s: float
    age_s: float


def this_process() -> ProcessIdentity:
    pid, host = os.getpid(), socket.gethostname()
    return ProcessIdentity(host, *_boot_and_pid_namespace(), pid, _start_ticks(pid) or 0)


def is_process_gone(process: ProcessIdentity) -> bool | None:
    """Returns whether a process has ended; None for one on another host or in another PID
    namespace."""
    if (process.boot, process.space) != _boot_and_pid_namespace():
        return None
    return _start_ticks(process.pid) != process.started


def _boot_and_pid_namespace() -> tuple[str, str]:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot_id, os.readlink("/proc/self/ns/pid")


def _start_ticks(pid: int) -> int | None:
    """Returns when a process was started, in clock ticks since the boot; None if it does not run,
    or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


class ClaimState(Enum):
    """State of another process's claim, as `classify_claim` sees it."""

    LOST = auto()
    HELD = auto()
    UNDECIDED = auto()  # may become any of the others
    BACK_OFF = auto()  # the other process is acquiring the folder, too, and has the smaller id


def classify_claim(other: OtherClaim, own: Claim) -> ClaimState:
    """Returns the state of another process's claim, for a process that acquires the folder."""
    claim = other.claim
    expired = other.age_s > claim.lease_s + CLOCK_SLACK_S
    expired = expired or (other.observed_s > claim.lease_s and not other.renewed)
    if other.process_gone or (other.process_gone is None and expired):
        return ClaimState.LOST
    if claim.holds and (other.process_gone is False or other.renewed):
        return ClaimState.HELD
    if claim.holds or own.id < claim.id:
        return ClaimState.UNDECIDED
    return ClaimState.BACK_OFF


class ClaimStore:
    """Claim files in a job's folder (a path or a URL), with the time of each observation. Raises
    StoreError."""

    def __init__(self, job_folder: str) -> None:
        self._url = join_url(job_folder, LEASE_FOLDER)
        self._observed: dict[str, tuple[Claim, float, bool]] = {}

    def write(self, claim: Claim) -> None:
        open_store(self._url).replace(f"{claim.id}.json", CLAIM_FORMAT.dump_json(claim))

    def delete(self, id_: str) -> None:
        open_store(self._url).remove(f"{id_}.json")

    def list_others(self, own_id: str) -> tuple[tuple[OtherClaim, ...], bool]:
        """Returns the claims of all other processes, and whether the own claim exists."""
        store = open_store(self._url)
        times = {
            match[1]: entry.modified_s
            for entry in store.list_folder()
            if (match := _CLAIM_FILE_NAME.fullmatch(entry.name))
        }
        now_s = times.get(own_id, 0.0)  # by the store's clock; 0 if unknown
        others = []
        for id_ in sorted(times.keys() - {own_id}):
            with suppress(StoreError, ValidationError):  # deleted since, or not a claim's file
                claim = CLAIM_FORMAT.validate_json(store.read(f"{id_}.json"))
                if claim.id == id_:
                    others.append(self._observe(claim, max(0.0, now_s - times[id_])))
        return tuple(others), own_id in times

    def _observe(self, claim: Claim, age_s: float) -> OtherClaim:
        now_s = time.monotonic()
        before, since_s, renewed = self._observed.get(claim.id, (claim, now_s, False))
        if before != claim:  # renewed, or acquired since then
            renewed = replace(before, beat=0) == replace(claim, beat=0)
            since_s = now_s
        self._observed[claim.id] = (claim, since_s, renewed)
        return OtherClaim(claim, is_process_gone(claim.process), renewed, now_s - since_s, age_s)

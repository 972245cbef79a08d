"""Acquires, renews and checks the lease of a job's folder, in the store that the folder is in."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from threading import Event, Lock, Thread

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.open_store import open_store
from rayzero.engine.checkpoint.store import join_url
from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.engine.redact import redact_url
from rayzero.orchestrator.errors import JobFailedError, JobStoppedError
from rayzero.orchestrator.job.lease import (
    CLAIM_POLL_S,
    RENEWALS_PER_LEASE,
    Claim,
    DeleteClaim,
    ListClaims,
    OtherClaim,
    Sleep,
    WriteClaim,
    acquire,
    is_process_gone,
    this_process,
)
from rayzero.orchestrator.journal.files import has_journal

LEASE_FOLDER = "lease"


_CLAIM_FILE_NAME = re.compile(r"([0-9a-f]{16})\.json")


class ClaimStore:
    """Claim files in a job's folder, with the time of each observation. Raises StoreError.

    Args:
        job_folder: a path or a URL.
        now_s: a monotonic clock.
    """

    def __init__(self, job_folder: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._url = join_url(job_folder, LEASE_FOLDER)
        self._now_s = now_s
        self._observed: dict[str, tuple[Claim, float, bool]] = {}

    def write(self, claim: Claim) -> None:
        open_store(self._url).replace(f"{claim.id}.json", claim.to_bytes())

    def delete(self, id_: str) -> None:
        open_store(self._url).remove(f"{id_}.json")

    def list_others(self, own_id: str) -> tuple[tuple[OtherClaim, ...], bool]:
        """All other claims, and True if the own claim exists."""
        store = open_store(self._url)
        times = {
            match[1]: entry.modified_s
            for entry in store.list_folder()
            if (match := _CLAIM_FILE_NAME.fullmatch(entry.name))
        }
        now_s = times.get(own_id, 0.0)  # by the store's clock; 0 if unknown
        others = []
        for id_ in sorted(times.keys() - {own_id}):
            with suppress(StoreError):  # deleted since the listing
                claim = Claim.parse(store.read(f"{id_}.json"))
                if claim is not None and claim.id == id_:
                    others.append(self._observe(claim, max(0.0, now_s - times[id_])))
        return tuple(others), own_id in times

    def _observe(self, claim: Claim, age_s: float) -> OtherClaim:
        now_s = self._now_s()
        before, since_s, changed = self._observed.get(claim.id, (claim, now_s, False))
        if replace(before, beat=0) != replace(claim, beat=0):
            before, since_s, changed = claim, now_s, False  # acquired since then
        elif before != claim:
            before, since_s, changed = claim, now_s, True
        self._observed[claim.id] = (before, since_s, changed)
        return OtherClaim(claim, is_process_gone(claim.process), changed, now_s - since_s, age_s)


RELEASE_TIMEOUT_S = 5.0
"""Limit for the end of the thread."""


class LeaseLostError(JobFailedError):
    """Another process holds the job's folder: this one must not write there."""


def acquire_lease(
    job_folder: str,
    job: str,
    lease_s: float,
    warn: Callable[[str], None],
    is_stopped: Callable[[], bool] = lambda: False,
) -> Lease:
    """Acquires a job's folder for this process. Waits for the end of a lease that may be lost.

    Raises:
        ConfigError: a live process holds it.
        JobStoppedError: `is_stopped` while waiting.
        StoreError: the folder cannot be written to.
    """
    own = Claim(secrets.token_hex(8), job, this_process(), lease_s)
    claims, protocol = ClaimStore(job_folder), acquire(own)
    warned = False
    operation = next(protocol)
    try:
        while True:
            others: tuple[OtherClaim, ...] = ()
            match operation:
                case WriteClaim(claim):
                    claims.write(claim)
                case DeleteClaim(id_):
                    claims.delete(id_)
                case ListClaims():
                    others, _ = claims.list_others(own.id)
                case Sleep(blocking):
                    if is_stopped():
                        claims.delete(own.id)
                        raise JobStoppedError(f"job {job!r} was stopped before it began")
                    if not warned:
                        warned = True
                        warn(
                            f"{_describe_holder(blocking)} holds {redact_url(job_folder)} and "
                            "may be lost: "
                            f"waiting at most {blocking.lease_s:g} s (checkpoint.lease_s)"
                        )
                    time.sleep(CLAIM_POLL_S)
            operation = protocol.send(others)
    except StopIteration as end:
        holder: Claim = end.value
    if holder.id != own.id:
        raise ConfigError(
            f"{redact_url(job_folder)} is in use: {_describe_holder(holder)} writes there",
            allowed="one running job per job folder",
            fix=f"another name or checkpoint.path, or `rayzero stop {holder.job}` with the "
            f"--address of its cluster; a lost process is detected after {holder.lease_s:g} s",
        )
    return Lease(job_folder, holder, claims, warn)


class Lease:
    """A held lease. Owns the thread `rayzero-lease`, until `release`."""

    def __init__(
        self, job_folder: str, claim: Claim, claims: ClaimStore, warn: Callable[[str], None]
    ) -> None:
        self.on_lost: Callable[[RayzeroError], None] = lambda _: None
        """Called once, in the thread."""
        self._job_folder = job_folder
        self._claim = claim
        self._claims = claims
        self._warn = warn
        self._lost: LeaseLostError | None = None
        self._check_lock = Lock()  # `check` runs in the lease's thread and in writers
        self._released = Event()
        self._thread = Thread(target=self._renew_loop, name="rayzero-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """To be called before each write that only the holder may do.

        Raises:
            LeaseLostError: another process has acquired the folder.
            StoreError: the claims cannot be read.
        """
        with self._check_lock:
            if self._lost is None:
                self._lost = self._find_loss()
            if self._lost is not None:
                raise LeaseLostError(self._lost.seen, fix=self._lost.fix)

    def release(self) -> None:
        """Releases the folder. May block for a few seconds; if the store does not take it, the
        lease expires."""
        self._released.set()
        self._thread.join(RELEASE_TIMEOUT_S)

    def _find_loss(self) -> LeaseLostError | None:
        others, exists = self._claims.list_others(self._claim.id)
        holders = [other.claim for other in others if other.claim.holds]
        newer = [claim for claim in holders if claim.epoch > self._claim.epoch]
        if exists and not newer:
            return None
        if not newer and not has_journal(self._job_folder):
            raise StoreError("gone", redact_url(self._job_folder), "the job's folder is not there")
        holder = _describe_holder(newer[0]) if newer else "another process"
        return LeaseLostError(
            f"{holder} has taken over {redact_url(self._job_folder)}, because this process did not "
            f"renew its lease for {self._claim.lease_s:g} s: it writes there no more",
            fix="the job continues there; a longer checkpoint.lease_s if the store is slow",
        )

    def _renew_loop(self) -> None:
        warned = False
        while not self._released.wait(self._claim.lease_s / RENEWALS_PER_LEASE):
            try:
                self.check()
                self._claim = replace(self._claim, beat=self._claim.beat + 1)
                self._claims.write(self._claim)
                warned = False
            except LeaseLostError as lost:
                self.on_lost(lost)
                return
            except RayzeroError as error:
                if not warned:
                    self._warn(f"the lease of the job's folder cannot be renewed: {error.seen}")
                warned = True
        try:
            self._claims.delete(self._claim.id)
        except RayzeroError:
            return  # the lease expires


def _describe_holder(claim: Claim) -> str:
    process = claim.process
    return f"the process {process.pid} on {process.host} of job {claim.job!r}"

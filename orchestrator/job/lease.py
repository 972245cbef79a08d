"""The lease of a job's folder: an exclusive lock of claim files, renewed by its holder.

Each process writes a claim of its own and then lists all claims. If two processes acquire at once,
at least one sees the other's claim, because both write before they list. The process with the
greater id that sees the other's claim deletes its own and starts again. The process with the
smaller id waits until the other claim is deleted, or holds the folder because the other process had
listed before. So there is at most one holder, in any store with read-after-write consistency.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TypeVar

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.store import is_remote, local_path
from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.engine.redact import redact_url
from rayzero.orchestrator.errors import JobFailedError, JobStoppedError, internal_error
from rayzero.orchestrator.job.claims import (
    Claim,
    ClaimState,
    ClaimStore,
    classify_claim,
)
from rayzero.orchestrator.journal.files import has_journal, read_journal

T = TypeVar("T")

CLAIM_POLL_S = 0.5  # pause between two lists of the claims
RENEWALS_PER_LEASE = 4  # renewals within `lease_s`; all but one of them may fail
RELEASE_TIMEOUT_S = 5.0  # how long `release` waits for the end of the thread


class LeaseLostError(JobFailedError):
    """Another process holds the job's folder, so this process must not write there."""


def acquire(own: Claim, claims: ClaimStore, wait: Callable[[Claim], None]) -> Claim:
    """Acquires the folder, unless another process holds it. Returns the claim of the holder, which
    is the own one or another process's.

    Args:
        wait: called with another process's claim that is not decided yet, before the claims are
            listed again.
    """
    while True:
        claims.write(own)
        others, _ = claims.list_others(own.id)
        by_state = {classify_claim(other, own): other.claim for other in others}
        if (holder := by_state.get(ClaimState.HELD)) is not None:
            claims.delete(own.id)
            return holder
        if (first := by_state.get(ClaimState.BACK_OFF)) is not None:
            claims.delete(own.id)
            wait(first)
        elif (undecided := by_state.get(ClaimState.UNDECIDED)) is not None:
            wait(undecided)
            own = replace(own, beat=own.beat + 1)
        else:
            epoch = max(own.epoch, *(other.claim.epoch for other in others), 0) + 1
            own = replace(own, holds=True, epoch=epoch)
            claims.write(own)
            for lost in others:  # after the own claim with the new epoch, so that epochs only grow
                claims.delete(lost.claim.id)
            return own


def outlast_store(
    call: Callable[[], T], warn: Callable[[str], None], is_stopped: Callable[[], bool]
) -> T:
    """Repeats `call` while the store does not answer, for a job whose workers train meanwhile.
    Blocks. Raises what `call` raises; JobStoppedError instead of StoreError once `is_stopped`."""
    warned = False
    while True:
        try:
            return call()
        except StoreError as error:
            if is_stopped():
                raise JobStoppedError(f"the job was stopped, and {error.seen}") from None
            if not warned:
                warn(f"trying again, while the workers train on: {error.seen}")
            warned = True
        time.sleep(CLAIM_POLL_S)


def acquire_lease(
    job_folder: str,
    own: Claim,
    warn: Callable[[str], None],
    is_stopped: Callable[[], bool] = lambda: False,
    *,
    trains: bool = False,
    run: str = "",
    on_lost: Callable[[RayzeroError], object] = lambda _: None,
    on_removed: Callable[[], object] = lambda: None,
) -> Lease:
    """Acquires a job's folder for this process. If the process of another claim may be lost, waits
    until that claim has expired.

    Args:
        own: this process's claim.
        is_stopped: ends the wait.
        trains: the job is training already, so a store that does not answer is tried again.
        run: id of the run that this process writes into the folder's journal.
        on_lost: called once, in the lease's thread, when another process has acquired the folder.
        on_removed: called in any thread, when the folder was removed and has been made again.

    Raises:
        ConfigError: a live process holds the folder.
        JobStoppedError: `is_stopped` returned True during the wait.
        StoreError: the folder cannot be written to.
    """
    claims, warned = ClaimStore(job_folder), False

    def wait(blocking: Claim) -> None:
        nonlocal warned
        if is_stopped():
            claims.delete(own.id)
            raise JobStoppedError(f"job {own.job!r} was stopped before it began")
        if not warned:
            warned = True
            warn(
                f"{_describe_holder(blocking)} holds {redact_url(job_folder)} and may be lost: "
                f"waiting at most {blocking.lease_s:g} s (checkpoint.lease_s)"
            )
        time.sleep(CLAIM_POLL_S)

    def begin() -> Claim:
        return acquire(own, claims, wait)

    holder = outlast_store(begin, warn, is_stopped) if trains else begin()
    if holder.id != own.id:
        raise ConfigError(
            f"{redact_url(job_folder)} is in use: {_describe_holder(holder)} writes there",
            allowed="one running job per job folder",
            fix=f"choose another name or checkpoint.path, or `rayzero stop {holder.job}` with the "
            f"--address of its cluster; a lost process is detected after {holder.lease_s:g} s",
        )
    return Lease(job_folder, holder, claims, run, warn, on_lost, on_removed)


def next_epoch(job_folder: str) -> int:
    """Returns the epoch of the next holder of a job's folder. Raises StoreError."""
    others, _ = ClaimStore(job_folder).list_others("")
    return 1 + max((other.claim.epoch for other in others), default=0)


class AwaitedLease:
    """A lease that is acquired in a thread, for a process that does other work before it may write.
    Owns the thread `rayzero-lease-wait`, which ends once the lease is acquired or refused."""

    def __init__(
        self,
        acquire: Callable[[Callable[[], bool]], Lease],
        on_refused: Callable[[RayzeroError], object],
    ) -> None:
        """
        Args:
            acquire: calls `acquire_lease` with the argument as `is_stopped`.
            on_refused: called in the thread with the error that `acquire` raises; not called after
                `release`.
        """
        self._acquire = acquire
        self._released = Event()
        self._on_refused = on_refused
        self._lease: Lease | None = None
        self._refusal: RayzeroError | None = None
        self._decided = Event()
        Thread(target=self._wait, name="rayzero-lease-wait", daemon=True).start()

    def wait(self) -> Lease:
        """Blocks until the lease is held. Raises as `acquire_lease`."""
        self._decided.wait()
        if self._lease is None:
            raise copy(self._refusal or JobStoppedError("the lease was given up"))
        return self._lease

    def check(self) -> None:
        """Waits until the lease is held, and calls `Lease.check`. For threads that may block."""
        self.wait().check()

    def release(self) -> None:
        """Calls `Lease.release` if the lease is held. Otherwise ends the wait for the lease."""
        self._released.set()
        if self._lease is not None:
            self._lease.release()

    def _wait(self) -> None:
        try:
            self._lease = self._acquire(self._released.is_set)
        except Exception as error:  # noqa: BLE001  # callers of `wait` must see every error
            self._refusal = error if isinstance(error, RayzeroError) else internal_error(error)
            if not self._released.is_set():
                self._on_refused(self._refusal)
        finally:
            self._decided.set()
        if self._lease is not None and self._released.is_set():  # `release` may not have seen it
            self._lease.release()


class Lease:
    """A held lease. Owns the thread `rayzero-lease`, which renews the lease until `release`."""

    def __init__(
        self,
        job_folder: str,
        claim: Claim,
        claims: ClaimStore,
        run: str,
        warn: Callable[[str], None],
        on_lost: Callable[[RayzeroError], object],
        on_removed: Callable[[], object],
    ) -> None:
        self._job_folder = job_folder
        self._parent = _parent_identity(job_folder)
        self._claim = claim
        self._claims = claims
        self._run = run
        self._warn = warn
        self._on_lost = on_lost
        self._on_removed = on_removed
        self._lost: LeaseLostError | None = None
        self._check_lock = Lock()  # `check` runs in the lease's thread and in writers
        self._released = Event()
        self._thread = Thread(target=self._renew_loop, name="rayzero-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Checks that this process holds the lease. Called before each write that only the holder
        may do. Makes the folder again if it was removed and no other process has acquired it since.
        Raises LeaseLostError if another process has; StoreError if the claims cannot be read."""
        with self._check_lock:
            if self._lost is None:
                self._lost = self._find_loss()
            if self._lost is not None:
                raise LeaseLostError(self._lost.seen, fix=self._lost.fix)

    @property
    def epoch(self) -> int:
        """Epoch of this lease, greater than that of every earlier holder."""
        return self._claim.epoch

    def release(self) -> None:
        """Releases the folder. May block for a few seconds. If the store does not answer, the lease
        expires instead."""
        self._released.set()
        self._thread.join(RELEASE_TIMEOUT_S)

    def _find_loss(self) -> LeaseLostError | None:
        others, exists = self._claims.list_others(self._claim.id)
        newer = [
            other.claim
            for other in others
            if other.claim.holds and other.claim.epoch > self._claim.epoch
        ]
        if exists and not newer:
            return None
        if not others and not self._released.is_set() and self._is_own_journal():
            return self._claim_again()
        return self._loss(newer[0] if newer else others[0].claim if others else None)

    def _is_own_journal(self) -> bool:
        """Returns whether the folder has a journal of this run, or none. No other process has
        written there then. Raises StoreError if more than the folder is gone, as after an unmount.
        """
        if _parent_identity(self._job_folder) != self._parent:
            text = "neither the job's folder nor the one that held it exist any more"
            raise StoreError("gone", redact_url(self._job_folder), text)
        if not has_journal(self._job_folder):
            return True
        history = read_journal(self._job_folder)
        return history is not None and history.run == self._run and not history.end_state

    def _claim_again(self) -> LeaseLostError | None:
        """Acquires the folder again, after it was removed with the claim and no other process has
        claimed it. Returns an error if another process acquires it meanwhile."""

        def give_way(other: Claim) -> None:
            raise self._loss(other)

        try:
            holder = acquire(replace(self._claim, holds=False), self._claims, give_way)
        except LeaseLostError as lost:
            self._claims.delete(self._claim.id)
            return lost
        if holder.id != self._claim.id:
            return self._loss(holder)
        self._claim = holder
        self._warn(
            f"{redact_url(self._job_folder)} was removed while the job runs: it is made again, "
            "without what was in it; the next checkpoint is stored at once"
        )
        self._on_removed()
        return None

    def _loss(self, other: Claim | None) -> LeaseLostError:
        holder = _describe_holder(other) if other else "another process"
        return LeaseLostError(
            f"{holder} has taken over {redact_url(self._job_folder)}, because this process did not "
            f"renew its lease for {self._claim.lease_s:g} s, or the folder was removed; this "
            "process writes nothing there now",
            fix="follow the job there; set a longer checkpoint.lease_s if the store is slow",
        )

    def _renew_loop(self) -> None:
        warned = False
        while not self._released.wait(self._claim.lease_s / RENEWALS_PER_LEASE):
            try:
                self.check()
                with self._check_lock:
                    self._claim = replace(self._claim, beat=self._claim.beat + 1)
                    self._claims.write(self._claim)
                warned = False
            except LeaseLostError as lost:
                self._on_lost(lost)
                return
            except RayzeroError as error:
                if not warned:
                    self._warn(f"the lease of the job's folder cannot be renewed: {error.seen}")
                warned = True
        with suppress(RayzeroError):  # the lease expires
            self._claims.delete(self._claim.id)


def _parent_identity(job_folder: str) -> tuple[int, int] | None:
    """Returns device and inode of the parent of a job's folder; None if the parent does not exist,
    or for a URL. If a disk is mounted at the parent, an unmount changes them."""
    if is_remote(job_folder):
        return None
    with suppress(OSError):
        status = Path(local_path(job_folder)).absolute().parent.stat()
        return status.st_dev, status.st_ino
    return None


def _describe_holder(claim: Claim) -> str:
    process = claim.process
    return f"the process {process.pid} on {process.host} of job {claim.job!r}"

"""Claims in a folder, renewal thread.

The claims on one job's folder, where they really are.

Takes a job's folder, renews that, and knows when it has become somebody else's.
"""

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
    """Reads and writes claims, and remembers when which was seen. All of it may raise StoreError.

    Args:
        archive: the job's folder, a path or a URL.
        now_s: a clock that never goes back.
    """

    def __init__(self, archive: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._url = join_url(archive, LEASE_FOLDER)
        self._now_s = now_s
        self._observed: dict[str, tuple[Claim, float, bool]] = {}

    def write(self, claim: Claim) -> None:
        open_store(self._url).replace(f"{claim.id}.json", claim.to_bytes())

    def delete(self, id_: str) -> None:
        open_store(self._url).remove(f"{id_}.json")

    def list_others(self, mine: str) -> tuple[tuple[OtherClaim, ...], bool]:
        """The claims of others, and whether one's own is there."""
        store = open_store(self._url)
        times = {
            found[1]: one.modified_s
            for one in store.list_folder()
            if (found := _CLAIM_FILE_NAME.fullmatch(one.name))
        }
        now_s = times.get(mine, 0.0)  # by the store's clock, or not known
        rivals = []
        for id_ in sorted(times.keys() - {mine}):
            with suppress(StoreError):  # it was taken back meanwhile
                claim = Claim.parse(store.read(f"{id_}.json"))
                if claim is not None and claim.id == id_:
                    rivals.append(self._observe(claim, max(0.0, now_s - times[id_])))
        return tuple(rivals), mine in times

    def _observe(self, claim: Claim, age_s: float) -> OtherClaim:
        now_s = self._now_s()
        before, since_s, changed = self._observed.get(claim.id, (claim, now_s, False))
        if replace(before, beat=0) != replace(claim, beat=0):
            before, since_s, changed = claim, now_s, False  # it holds by now
        elif before != claim:
            before, since_s, changed = claim, now_s, True
        self._observed[claim.id] = (before, since_s, changed)
        return OtherClaim(claim, is_process_gone(claim.process), changed, now_s - since_s, age_s)


RELEASE_TIMEOUT_S = 5.0
"""How long the thread may take to end."""


class LeaseLostError(JobFailedError):
    """The job's folder is somebody else's by now: nothing more may be written there."""


def acquire_lease(
    archive: str,
    job: str,
    lease_s: float,
    tell: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> Lease:
    """Makes a job's folder this process's. Waits as long as a lease lasts for one that seems lost,
    and tells that.

    Raises:
        ConfigError: it is another's, who lives.
        JobStoppedError: it was stopped meanwhile.
        StoreError: the place cannot be written to.
    """
    me = Claim(secrets.token_hex(8), job, this_process(), lease_s)
    claims, way = ClaimStore(archive), acquire(me)
    told = False
    operation = next(way)
    try:
        while True:
            rivals: tuple[OtherClaim, ...] = ()
            match operation:
                case WriteClaim(claim):
                    claims.write(claim)
                case DeleteClaim(id_):
                    claims.delete(id_)
                case ListClaims():
                    rivals, _ = claims.list_others(me.id)
                case Sleep(rival):
                    if stopped():
                        claims.delete(me.id)
                        raise JobStoppedError(f"job {job!r} was stopped before it began")
                    if not told:
                        told = True
                        tell(
                            f"{_describe_holder(rival)} has {redact_url(archive)}, and may be lost: "
                            f"waiting at most {rival.lease_s:g} s (checkpoint.lease_s)"
                        )
                    time.sleep(CLAIM_POLL_S)
            operation = way.send(rivals)
    except StopIteration as end:
        holder: Claim = end.value
    if holder.id != me.id:
        raise ConfigError(
            f"{redact_url(archive)} is in use: {_describe_holder(holder)} writes there",
            allowed="one cluster at a time in a job's folder",
            fix=f"another name or checkpoint.path, or `rayzero stop {holder.job}` with the "
            f"--address of its cluster; a lost one is known as such after {holder.lease_s:g} s",
        )
    return Lease(archive, holder, claims, tell)


class Lease:
    """Owns the thread `rayzero-lease`, from the beginning to `release`."""

    def __init__(
        self, archive: str, claim: Claim, claims: ClaimStore, tell: Callable[[str], None]
    ) -> None:
        self.on_lost: Callable[[RayzeroError], None] = lambda _: None
        """Told in the thread, once."""
        self._job_folder = archive
        self._claim = claim
        self._claims = claims
        self._warn = tell
        self._lost: LeaseLostError | None = None
        self._check_lock = Lock()  # the claims are looked at by the thread and by who commits
        self._released = Event()
        self._thread = Thread(target=self._renew_loop, name="rayzero-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """To be called before what another holder must not see done.

        Raises:
            LeaseLostError: the folder is another's.
            StoreError: it cannot be looked at.
        """
        with self._check_lock:
            if self._lost is None:
                self._lost = self._find_loss()
            if self._lost is not None:
                raise LeaseLostError(self._lost.seen, fix=self._lost.fix)

    def release(self) -> None:
        """Lets go of the folder. May block for a few seconds; a store that does not take it is left
        to the lease's end."""
        self._released.set()
        self._thread.join(RELEASE_TIMEOUT_S)

    def _find_loss(self) -> LeaseLostError | None:
        rivals, there = self._claims.list_others(self._claim.id)
        newer = [one.claim for one in rivals if one.claim.holds]
        newer = [one for one in newer if one.epoch > self._claim.epoch]
        if there and not newer:
            return None
        if not newer and not has_journal(self._job_folder):
            raise StoreError("gone", redact_url(self._job_folder), "the job's folder is not there")
        who = _describe_holder(newer[0]) if newer else "somebody"
        return LeaseLostError(
            f"{who} has taken {redact_url(self._job_folder)} over, because this process gave no sign of "
            f"life there for {self._claim.lease_s:g} s: it writes there no more",
            fix="the job goes on there; a longer checkpoint.lease_s if the store is slow",
        )

    def _renew_loop(self) -> None:
        told = False
        while not self._released.wait(self._claim.lease_s / RENEWALS_PER_LEASE):
            try:
                self.check()
                self._claim = replace(self._claim, beat=self._claim.beat + 1)
                self._claims.write(self._claim)
                told = False
            except LeaseLostError as lost:
                self.on_lost(lost)
                return
            except RayzeroError as error:
                if not told:
                    self._warn(f"the lease of the job's folder cannot be renewed: {error.seen}")
                told = True
        try:
            self._claims.delete(self._claim.id)
        except RayzeroError:
            return  # whoever comes next waits for its end


def _describe_holder(claim: Claim) -> str:
    where = claim.process
    return f"the process {where.pid} on {where.host} of job {claim.job!r}"

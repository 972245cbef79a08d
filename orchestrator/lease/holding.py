"""Takes a job's folder, renews that, and knows when it has become somebody else's."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Event, Lock, Thread

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.store import open_store
from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.engine.masking import masked
from rayzero.orchestrator.errors import JobFailedError, JobStoppedError
from rayzero.orchestrator.journal.segments import folder
from rayzero.orchestrator.lease.claim import RENEWALS, Claim, Rival, here
from rayzero.orchestrator.lease.folder import Claims
from rayzero.orchestrator.lease.protocol import POLL_S, Drop, Look, Pause, Put, asking

GO_S = 5.0
"""How long the thread may take to end."""


class LeaseLostError(JobFailedError):
    """The job's folder is somebody else's by now: nothing more may be written there."""


def take(
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
    me = Claim(secrets.token_hex(8), job, here(), lease_s)
    claims, way = Claims(archive), asking(me)
    told = False
    operation = next(way)
    try:
        while True:
            rivals: tuple[Rival, ...] = ()
            match operation:
                case Put(claim):
                    claims.put(claim)
                case Drop(id_):
                    claims.drop(id_)
                case Look():
                    rivals, _ = claims.look(me.id)
                case Pause(rival):
                    if stopped():
                        claims.drop(me.id)
                        raise JobStoppedError(f"job {job!r} was stopped before it began")
                    if not told:
                        told = True
                        tell(
                            f"{_who(rival)} has {masked(archive)}, and may be lost: "
                            f"waiting at most {rival.lease_s:g} s (checkpoint.lease_s)"
                        )
                    time.sleep(POLL_S)
            operation = way.send(rivals)
    except StopIteration as end:
        holder: Claim = end.value
    if holder.id != me.id:
        raise ConfigError(
            f"{masked(archive)} is in use: {_who(holder)} writes there",
            allowed="one cluster at a time in a job's folder",
            fix=f"another name or checkpoint.path, or `rayzero stop {holder.job}` with the "
            f"--address of its cluster; a lost one is known as such after {holder.lease_s:g} s",
        )
    return Lease(archive, holder, claims, tell)


class Lease:
    """Owns the thread `rayzero-lease`, from the beginning to `release`."""

    def __init__(
        self, archive: str, claim: Claim, claims: Claims, tell: Callable[[str], None]
    ) -> None:
        self.on_lost: Callable[[RayzeroError], None] = lambda _: None
        """Told in the thread, once."""
        self._archive = archive
        self._claim = claim
        self._claims = claims
        self._tell = tell
        self._lost: LeaseLostError | None = None
        self._asking = Lock()  # the claims are looked at by the thread and by who commits
        self._over = Event()
        self._thread = Thread(target=self._keep, name="rayzero-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """To be called before what another holder must not see done.

        Raises:
            LeaseLostError: the folder is another's.
            StoreError: it cannot be looked at.
        """
        with self._asking:
            if self._lost is None:
                self._lost = self._look()
            if self._lost is not None:
                raise LeaseLostError(self._lost.seen, fix=self._lost.fix)

    def release(self) -> None:
        """Lets go of the folder. May block for a few seconds; a store that does not take it is left
        to the lease's end."""
        self._over.set()
        self._thread.join(GO_S)

    def _look(self) -> LeaseLostError | None:
        rivals, there = self._claims.look(self._claim.id)
        newer = [one.claim for one in rivals if one.claim.holds]
        newer = [one for one in newer if one.epoch > self._claim.epoch]
        if there and not newer:
            return None
        if not newer and not open_store(folder(self._archive)).entries():
            raise StoreError("gone", masked(self._archive), "the job's folder is not there")
        who = _who(newer[0]) if newer else "somebody"
        return LeaseLostError(
            f"{who} has taken {masked(self._archive)} over, because this process gave no sign of "
            f"life there for {self._claim.lease_s:g} s: it writes there no more",
            fix="the job goes on there; a longer checkpoint.lease_s if the store is slow",
        )

    def _keep(self) -> None:
        told = False
        while not self._over.wait(self._claim.lease_s / RENEWALS):
            try:
                self.check()
                self._claim = replace(self._claim, beat=self._claim.beat + 1)
                self._claims.put(self._claim)
                told = False
            except LeaseLostError as lost:
                self.on_lost(lost)
                return
            except RayzeroError as error:
                if not told:
                    self._tell(f"the lease of the job's folder cannot be renewed: {error.seen}")
                told = True
        try:
            self._claims.drop(self._claim.id)
        except RayzeroError:
            return  # whoever comes next waits for its end


def _who(claim: Claim) -> str:
    where = claim.process
    return f"the process {where.pid} on {where.host} of job {claim.job!r}"

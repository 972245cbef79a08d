"""Mutual exclusion by claim files, for random interleavings and deaths of processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Semaphore, Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayzero.orchestrator.job.claims import (
    CLAIM_FORMAT,
    Claim,
    ClaimState,
    ClaimStore,
    OtherClaim,
    ProcessIdentity,
    classify_claim,
)
from rayzero.orchestrator.job.lease import acquire

WAIT_TURNS = 4  # a wait is longer than an access: without one, processes in step block each other
PROCESS = ProcessIdentity("host", "boot", "space", 1, 1)


def claim(id_: str, **changes: object) -> Claim:
    return replace(Claim(id_, "job", PROCESS, 10.0), **changes)  # type: ignore[arg-type]


class ProcessDiedError(Exception):
    pass


class Acquirer(ClaimStore):
    """A simulated process: a thread that pauses before each access to the store, and to wait.

    Every process sees all previous writes, and which processes are dead.
    """

    def __init__(self, id_: str, claims: dict[str, Claim], acquirers: dict[str, Acquirer]) -> None:
        self.id = id_
        self.dead = False
        self.holder: Claim | None = None
        self._claims = claims
        self._acquirers = acquirers
        self._turn, self._paused = Semaphore(0), Semaphore(0)
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()
        self._paused.acquire()

    @property
    def holds(self) -> bool:
        return self.holder is not None and self.holder.id == self.id and not self.dead

    @property
    def is_waiting(self) -> bool:
        return self.holder is None and not self.dead

    def step(self) -> None:
        """Continue to the next access to the store, or to the end."""
        self._turn.release()
        self._paused.acquire()

    def die(self) -> None:
        self.dead = True
        self.step()
        self._thread.join()

    def write(self, claim: Claim) -> None:
        self._pause()
        self._claims[claim.id] = claim

    def delete(self, id_: str) -> None:
        self._pause()
        self._claims.pop(id_, None)

    def list_others(self, own_id: str) -> tuple[tuple[OtherClaim, ...], bool]:
        self._pause()
        others = tuple(
            OtherClaim(other, self._acquirers[other.id].dead, False, 0.0, 0.0)
            for other in self._claims.values()
            if other.id != own_id
        )
        return others, own_id in self._claims

    def _pause(self) -> None:
        self._paused.release()
        self._turn.acquire()
        if self.dead:
            raise ProcessDiedError

    def _wait(self, _: Claim) -> None:
        for _ in range(WAIT_TURNS):
            self._pause()

    def _run(self) -> None:
        with suppress(ProcessDiedError):
            self.holder = acquire(claim(self.id), self, self._wait)
        self._paused.release()


@contextmanager
def acquirers(*ids: str) -> Iterator[tuple[dict[str, Acquirer], dict[str, Claim]]]:
    claims: dict[str, Claim] = {}
    processes: dict[str, Acquirer] = {}
    for id_ in ids:
        processes[id_] = Acquirer(id_, claims, processes)
    try:
        yield processes, claims
    finally:
        for process in processes.values():
            if process.is_waiting:
                process.die()


@settings(max_examples=300, deadline=None)
@given(st.permutations(["1", "2", "3"]), st.data())
def test_exactly_one_process_acquires_folder(ids: list[str], data: st.DataObject):
    with acquirers(*ids) as (processes, _):
        for _ in range(60):
            waiting = [process for process in processes.values() if process.is_waiting]
            if not waiting:
                break
            process = data.draw(st.sampled_from(waiting))
            if data.draw(st.integers(0, 19)) == 0:
                process.die()
            else:
                process.step()
            assert sum(process.holds for process in processes.values()) <= 1
        for _ in range(200):  # round-robin, until all have ended
            for process in processes.values():
                if process.is_waiting:
                    process.step()
        alive = [process for process in processes.values() if not process.dead]
        assert sum(process.holds for process in alive) <= 1
        holders = [processes[process.holder.id] for process in alive if process.holder is not None]
        assert len(holders) == len(alive)
        assert all(holder.holds or holder.dead for holder in holders)


def test_later_holder_has_higher_epoch():
    with acquirers("1", "2") as (processes, claims):
        first, second = processes.values()
        while first.is_waiting:
            first.step()
        first.dead = True
        while second.is_waiting:
            second.step()
        assert first.holder is not None
        assert second.holder is not None
        assert second.holder.epoch > first.holder.epoch
        assert list(claims) == ["2"]


HOLDER = claim("2", holds=True, epoch=1)


@pytest.mark.parametrize(
    ("other", "state"),
    [
        (OtherClaim(HOLDER, True, False, 0.0, 0.0), ClaimState.LOST),
        (OtherClaim(HOLDER, False, False, 99.0, 99.0), ClaimState.HELD),  # stopped, not ended
        (OtherClaim(HOLDER, None, False, 1.0, 1.0), ClaimState.UNDECIDED),
        (OtherClaim(HOLDER, None, True, 1.0, 1.0), ClaimState.HELD),
        (OtherClaim(HOLDER, None, False, 10.1, 10.1), ClaimState.LOST),
        (OtherClaim(HOLDER, None, False, 0.0, 13.1), ClaimState.LOST),  # old when first seen
        (OtherClaim(claim("0"), None, False, 0.0, 0.0), ClaimState.BACK_OFF),
        (OtherClaim(claim("2"), None, False, 0.0, 0.0), ClaimState.UNDECIDED),
        (OtherClaim(claim("0"), None, False, 10.1, 10.1), ClaimState.LOST),
    ],
)
def test_state_of_another_claim(other: OtherClaim, state: ClaimState):
    assert classify_claim(other, claim("1")) is state


@pytest.mark.parametrize("lease_s", ["1e18", "-1", "NaN"])
def test_claim_with_a_lease_that_no_job_can_have_is_no_claim(tmp_path: Path, lease_s: str):
    """It was waited for, 30 billion years at most."""
    other = CLAIM_FORMAT.dump_json(claim("0" * 16)).decode()
    assert '"lease_s":10.0' in other
    store = ClaimStore(str(tmp_path))
    store.write(claim("1" * 16))
    file = tmp_path / "lease" / f"{'0' * 16}.json"
    file.write_text(other)
    assert len(store.list_others("1" * 16)[0]) == 1
    file.write_text(other.replace('"lease_s":10.0', f'"lease_s":{lease_s}'))
    assert store.list_others("1" * 16) == ((), True)

"""Taking, holding and losing a real folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.job import lease_holder
from rayzero.orchestrator.job.lease import Claim, is_process_gone, this_process
from rayzero.orchestrator.job.lease_holder import (
    LEASE_FOLDER,
    ClaimStore,
    Lease,
    LeaseLostError,
    acquire_lease,
)

ELSEWHERE = replace(this_process(), host="other", boot="another boot")


def taken(folder: Path, lease_s: float = 60.0, tell: Callable[[str], None] = print) -> Lease:
    return acquire_lease(str(folder), "job", lease_s, tell)


def claims(folder: Path) -> list[Claim]:
    found = (Claim.parse(one.read_bytes()) for one in (folder / LEASE_FOLDER).glob("*.json"))
    return [one for one in found if one is not None]


def until(there: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 30
    while not there():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_folder_is_one_process_s_until_it_lets_go(tmp_path: Path):
    first = taken(tmp_path)
    with pytest.raises(ConfigError) as refused:
        taken(tmp_path)
    assert (
        f"{tmp_path} is in use: the process {this_process().pid} on {this_process().host}"
        in str(refused.value)
    )
    assert "rayzero stop job" in str(refused.value)
    first.check()
    first.release()
    assert claims(tmp_path) == []
    taken(tmp_path).release()


def test_a_dead_process_of_this_host_is_not_waited_for(tmp_path: Path):
    script = f"""
from rayzero.orchestrator.job.lease_holder import acquire_lease
import os, signal
acquire_lease({str(tmp_path)!r}, "job", 3600.0, print)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    (left,) = claims(tmp_path)
    assert (left.holds, is_process_gone(left.process)) == (True, True)
    told: list[str] = []
    taken(tmp_path, tell=told.append).release()
    assert told == []


def test_a_lost_process_elsewhere_is_waited_for_and_then_taken_over(tmp_path: Path):
    ClaimStore(str(tmp_path)).write(Claim("0" * 16, "job", ELSEWHERE, 1.0, holds=True, epoch=7))
    fresh_s = time.time() + 3600  # else it might be old before it is seen
    os.utime(tmp_path / LEASE_FOLDER / f"{'0' * 16}.json", (fresh_s, fresh_s))
    told: list[str] = []
    lease = taken(tmp_path, tell=told.append)
    assert len(told) == 1
    assert "waiting at most 1 s (checkpoint.lease_s)" in told[0]
    assert "on other of job 'job'" in told[0]
    assert [one.epoch for one in claims(tmp_path)] == [8]
    lease.release()


def test_a_living_process_elsewhere_refuses(tmp_path: Path):
    other = Claim("0" * 16, "job", ELSEWHERE, 3600.0, holds=True, epoch=7)
    store = ClaimStore(str(tmp_path))
    store.write(other)
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        store.write(replace(other, beat=1))  # while it is waited for

    with pytest.raises(ConfigError, match=r"is in use: the process \d+ on other"):
        taken(tmp_path, tell=tell)
    assert claims(tmp_path) == [replace(other, beat=1)]


def test_a_stop_ends_the_wait(tmp_path: Path):
    ClaimStore(str(tmp_path)).write(Claim("0" * 16, "job", ELSEWHERE, 3600.0, holds=True))
    with pytest.raises(JobStoppedError):
        acquire_lease(str(tmp_path), "job", 60.0, print, lambda: True)
    assert len(claims(tmp_path)) == 1


def test_who_was_taken_over_knows_before_it_commits(tmp_path: Path):
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "x").touch()
    lease = taken(tmp_path, 1.0)
    lost: list[RayzeroError] = []
    known = threading.Event()
    lease.on_lost = lambda error: (lost.append(error), known.set())  # type: ignore[func-returns-value]
    (mine,) = claims(tmp_path)
    newer = replace(mine, id="f" * 16, epoch=mine.epoch + 1, process=ELSEWHERE)
    ClaimStore(str(tmp_path)).write(newer)
    with pytest.raises(LeaseLostError, match="on other of job 'job' has taken"):
        lease.check()
    assert known.wait(30)
    assert isinstance(lost[0], LeaseLostError)
    lease.release()
    assert newer in claims(tmp_path)


def test_one_that_is_gone_from_its_folder_has_been_taken_over(tmp_path: Path):
    """By somebody who has ended since."""
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "x").touch()
    lease = taken(tmp_path)
    shutil.rmtree(tmp_path / LEASE_FOLDER)
    with pytest.raises(LeaseLostError, match="another process has taken over"):
        lease.check()
    lease.release()


def test_a_place_that_is_away_is_no_takeover(tmp_path: Path):
    lease = taken(tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(StoreError):
        lease.check()
    lease.release()


def test_a_store_that_fails_is_told_once_and_the_lease_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lease_holder, "RENEWALS_PER_LEASE", 100)
    told: list[str] = []
    lease = taken(tmp_path, 1.0, told.append)
    put, failing = ClaimStore.write, threading.Event()
    failures: list[int] = []

    def flaky(self: ClaimStore, claim: Claim) -> None:
        if failing.is_set():
            failures.append(claim.beat)
            raise StoreError("full", "disk", "No space left on device")
        put(self, claim)

    failing.set()
    monkeypatch.setattr(ClaimStore, "write", flaky)
    until(lambda: len(failures) >= 3)
    failing.clear()
    until(lambda: claims(tmp_path)[0].beat > failures[-1])
    assert len(told) == 1
    assert "cannot be renewed" in told[0]
    lease.check()
    lease.release()

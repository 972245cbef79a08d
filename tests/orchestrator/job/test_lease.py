"""Acquiring, holding and losing the lease of a real folder."""

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
from rayzero.orchestrator.errors import JobFailedError, JobStoppedError
from rayzero.orchestrator.job import lease as lease_module
from rayzero.orchestrator.job.claims import (
    CLAIM_FORMAT,
    LEASE_FOLDER,
    Claim,
    ClaimStore,
    is_process_gone,
    new_claim,
    this_process,
)
from rayzero.orchestrator.job.lease import AwaitedLease, Lease, LeaseLostError, acquire_lease
from tests.orchestrator.support import begun, write_journal

REMOTE_PROCESS = replace(this_process(), host="other", boot="another boot")


def acquire(
    folder: Path,
    lease_s: float = 60.0,
    warn: Callable[[str], None] = print,
    on_lost: Callable[[RayzeroError], object] = print,
) -> Lease:
    return acquire_lease(str(folder), new_claim("job", lease_s), warn, on_lost=on_lost)


def claims(folder: Path) -> list[Claim]:
    files = (folder / LEASE_FOLDER).glob("*.json")
    return [CLAIM_FORMAT.validate_json(file.read_bytes()) for file in files]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_lease_is_exclusive_until_released(tmp_path: Path):
    first = acquire(tmp_path)
    with pytest.raises(ConfigError) as error:
        acquire(tmp_path)
    assert (
        f"{tmp_path} is in use: the process {this_process().pid} on {this_process().host}"
        in str(error.value)
    )
    assert "rayzero stop job" in str(error.value)
    first.check()
    first.release()
    assert claims(tmp_path) == []
    acquire(tmp_path).release()


def test_lease_of_dead_local_process_is_taken_over_immediately(tmp_path: Path):
    script = f"""
from rayzero.orchestrator.job.claims import new_claim
from rayzero.orchestrator.job.lease import acquire_lease
import os, signal
acquire_lease({str(tmp_path)!r}, new_claim("job", 3600.0), print)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    (lost,) = claims(tmp_path)
    assert (lost.holds, is_process_gone(lost.process)) == (True, True)
    warnings: list[str] = []
    acquire(tmp_path, warn=warnings.append).release()
    assert warnings == []


def test_lease_of_lost_remote_process_is_taken_over_after_expiry(tmp_path: Path):
    ClaimStore(str(tmp_path)).write(
        Claim("0" * 16, "job", REMOTE_PROCESS, 1.0, holds=True, epoch=7)
    )
    fresh_s = time.time() + 3600  # otherwise the claim might expire before it is first read
    os.utime(tmp_path / LEASE_FOLDER / f"{'0' * 16}.json", (fresh_s, fresh_s))
    warnings: list[str] = []
    lease = acquire(tmp_path, warn=warnings.append)
    assert len(warnings) == 1
    assert "waiting at most 1 s (checkpoint.lease_s)" in warnings[0]
    assert "on other of job 'job'" in warnings[0]
    assert [claim.epoch for claim in claims(tmp_path)] == [8]
    lease.release()


def test_lease_of_live_remote_process_is_kept(tmp_path: Path):
    other = Claim("0" * 16, "job", REMOTE_PROCESS, 3600.0, holds=True, epoch=7)
    store = ClaimStore(str(tmp_path))
    store.write(other)

    def renew_during_wait(_: str) -> None:
        store.write(replace(other, beat=1))

    with pytest.raises(ConfigError, match=r"is in use: the process \d+ on other"):
        acquire(tmp_path, warn=renew_during_wait)
    assert claims(tmp_path) == [replace(other, beat=1)]


def test_stop_interrupts_wait_for_lease(tmp_path: Path):
    ClaimStore(str(tmp_path)).write(Claim("0" * 16, "job", REMOTE_PROCESS, 3600.0, holds=True))
    with pytest.raises(JobStoppedError):
        acquire_lease(str(tmp_path), new_claim("job", 60.0), print, lambda: True)
    assert len(claims(tmp_path)) == 1


def test_takeover_is_detected_by_check(tmp_path: Path):
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "x").touch()
    lost: list[RayzeroError] = []
    detected = threading.Event()
    lease = acquire(tmp_path, 1.0, on_lost=lambda error: (lost.append(error), detected.set()))
    (claim,) = claims(tmp_path)
    newer = replace(claim, id="f" * 16, epoch=claim.epoch + 1, process=REMOTE_PROCESS)
    ClaimStore(str(tmp_path)).write(newer)
    with pytest.raises(LeaseLostError, match="on other of job 'job' has taken"):
        lease.check()
    assert detected.wait(30)
    assert isinstance(lost[0], LeaseLostError)
    lease.release()
    assert newer in claims(tmp_path)


def test_missing_claim_is_a_takeover(tmp_path: Path):
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "x").touch()
    lease = acquire(tmp_path)
    shutil.rmtree(tmp_path / LEASE_FOLDER)
    with pytest.raises(LeaseLostError, match="another process has taken over"):
        lease.check()
    lease.release()


@pytest.mark.parametrize("left", ["nothing", "the folder", "its journal"])
def test_removed_job_folder_is_claimed_again(tmp_path: Path, left: str):
    """Also in the middle of `rm -rf`, which may have removed the claim first."""
    folder, removed, warnings = tmp_path / "job", threading.Event(), list[str]()
    lease = acquire_lease(
        str(folder), new_claim("job", 60.0), warnings.append, run="7", on_removed=removed.set
    )
    write_journal(folder, begun({}, run="7"))
    (old,) = claims(folder)
    shutil.rmtree(folder / LEASE_FOLDER if left == "its journal" else folder)
    if left == "the folder":
        folder.mkdir()
    lease.check()
    lease.check()
    assert removed.is_set()
    (text,) = warnings
    assert f"{folder} was removed while the job runs" in text
    (claim,) = claims(folder)
    assert (claim.id, claim.holds, claim.epoch) == (old.id, True, old.epoch + 1)
    with pytest.raises(ConfigError, match="is in use"):
        acquire(folder)
    lease.release()
    assert claims(folder) == []
    with pytest.raises(LeaseLostError):
        lease.check()


@pytest.mark.parametrize("ended", [True, False])
def test_removed_job_folder_that_another_job_has_acquired_is_lost(tmp_path: Path, ended: bool):
    folder, lost = tmp_path / "job", list[RayzeroError]()
    lease = acquire(folder, on_lost=lost.append)
    shutil.rmtree(folder)
    other = acquire(folder)
    write_journal(folder, begun({}, run="8"))
    if ended:
        other.release()
    with pytest.raises(LeaseLostError, match="has taken over"):
        lease.check()
    lease.release()
    other.release()


@pytest.mark.parametrize("holds", [True, False])
def test_removed_job_folder_that_another_job_acquires_first_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: bool
):
    """Between this process's look at the claims and its new claim."""
    lease, write = acquire(folder := tmp_path / "job"), ClaimStore.write
    shutil.rmtree(folder)
    other = Claim("0" * 16, "other", this_process(), 60.0, holds=holds, epoch=int(holds))

    def write_second(self: ClaimStore, claim: Claim) -> None:
        write(self, other)
        write(self, claim)

    with monkeypatch.context() as patch:
        patch.setattr(ClaimStore, "write", write_second)
        with pytest.raises(LeaseLostError, match="of job 'other' has taken over"):
            lease.check()
    assert claims(folder) == [other]
    lease.release()


def test_job_folder_that_is_gone_with_its_disk_is_not_made_again(tmp_path: Path):
    lease = acquire(tmp_path / "disk" / "job")
    (tmp_path / "disk").rename(tmp_path / "unmounted")  # a new folder has another inode then
    with pytest.raises(StoreError, match="neither the job's folder nor"):
        lease.check()
    (tmp_path / "disk").mkdir()  # what a disk was mounted on
    with pytest.raises(StoreError):
        lease.check()
    assert list((tmp_path / "disk").iterdir()) == []
    lease.release()


def test_failed_renewals_are_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease_module, "RENEWALS_PER_LEASE", 100)
    warnings: list[str] = []
    lease = acquire(tmp_path, 1.0, warnings.append)
    write, failing = ClaimStore.write, threading.Event()
    failures: list[int] = []

    def flaky(self: ClaimStore, claim: Claim) -> None:
        if failing.is_set():
            failures.append(claim.beat)
            raise StoreError("full", "disk", "No space left on device")
        write(self, claim)

    failing.set()
    monkeypatch.setattr(ClaimStore, "write", flaky)
    wait_until(lambda: len(failures) >= 3)
    failing.clear()
    wait_until(lambda: claims(tmp_path)[0].beat > failures[-1])
    assert len(warnings) == 1
    assert "cannot be renewed" in warnings[0]
    lease.check()
    lease.release()


def test_awaited_lease_lets_nobody_write_before_it_is_held(tmp_path: Path):
    may_begin, refused = threading.Event(), list[RayzeroError]()

    def begin(is_released: Callable[[], bool]) -> Lease:
        may_begin.wait(30.0)
        return acquire(tmp_path)

    awaited = AwaitedLease(begin, refused.append)
    writer = threading.Thread(target=awaited.check)
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    may_begin.set()
    writer.join(30.0)
    assert not writer.is_alive()
    awaited.release()
    assert refused == []


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (JobStoppedError("it was stopped"), JobStoppedError),
        (ConfigError("in use", "one job", "another name"), ConfigError),
        (KeyError("claim"), JobFailedError),
    ],
    ids=lambda it: getattr(it, "__name__", type(it).__name__),
)
def test_refused_lease_is_seen_by_all_that_wait(raised: Exception, seen: type[RayzeroError]):
    refused = list[RayzeroError]()

    def fail(is_released: Callable[[], bool]) -> Lease:
        raise raised

    awaited = AwaitedLease(fail, refused.append)
    for _ in range(2):
        with pytest.raises(seen):
            awaited.check()
    assert [type(it) for it in refused] == [seen]
    awaited.release()


def test_lease_that_was_released_is_waited_for_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The store of a job that trains does not answer until the job has ended."""
    monkeypatch.setattr(lease_module, "CLAIM_POLL_S", 0.01)
    tries, warnings, refused = list[str](), list[str](), list[RayzeroError]()

    def fail(self: ClaimStore, but: str) -> None:
        tries.append(but)
        raise StoreError("slow", "s3://runs", "no answer")

    def begin(is_released: Callable[[], bool]) -> Lease:
        return acquire_lease(
            str(tmp_path), new_claim("job", 60.0), warnings.append, is_released, trains=True
        )

    with monkeypatch.context() as patch:
        patch.setattr(ClaimStore, "list_others", fail)
        awaited = AwaitedLease(begin, refused.append)
        wait_until(lambda: len(tries) > 2)
        awaited.release()
        with pytest.raises(JobStoppedError, match="no answer"):
            awaited.wait()
    assert (len(warnings), refused) == (1, [])

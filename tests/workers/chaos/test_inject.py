"""Faults in a worker: when they fire, and their records.

That kills and stops are recorded before they take effect, and not injected again in a repair, or
with a list that grows while the job runs, is tested in test_recovery.py."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.workers.chaos.inject import (
    FaultRecord,
    FaultSchedule,
    InjectedError,
    WorkerFaultInjector,
    damage_file,
)
from rayzero.workers.chaos.spec import FaultFired, parse_fault


class Worker:
    """A rank in a generation, driven as by a session."""

    def __init__(self, folder: Path, rank: int, *texts: str) -> None:
        self.posted: list[FaultFired] = []
        faults = [parse_fault(text) for text in texts]
        self.schedule = FaultSchedule(FaultRecord(folder), self.posted.append)
        self.schedule.set_faults(faults)
        self.injector = WorkerFaultInjector(self.schedule, rank)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            for phase in ("data", "forward", "backward", "forward", "backward", "reduce"):
                self.injector.on_phase(phase, step)


ERROR = 'raise_error(rank=1, step=3, phase="backward")'


def test_fault_fires_only_at_its_rank_step_and_phase(tmp_path: Path) -> None:
    Worker(tmp_path, 0, ERROR).steps(1, 9)
    worker = Worker(tmp_path, 1, ERROR)
    worker.steps(1, 2)
    worker.injector.on_phase("forward", 3)
    assert FaultRecord(tmp_path).read() == ()
    with pytest.raises(InjectedError, match="injected in phase backward of step 3"):
        worker.injector.on_phase("backward", 3)
    assert worker.posted == [FaultFired(1, 3, ERROR)]
    assert FaultRecord(tmp_path).read() == (FaultFired(1, 3, ERROR),)


def test_repeated_faults_fire_as_often_as_specified(tmp_path: Path) -> None:
    twice = 'raise_error(rank=0, step=3, phase="data", times=2)'
    for count in (1, 2):
        with pytest.raises(InjectedError):
            Worker(tmp_path, 0, twice).steps(3, 3)
        assert len(FaultRecord(tmp_path).read()) == count
    Worker(tmp_path, 0, twice).steps(3, 9)
    equal = ["raise_error(rank=0, step=9)"] * 2
    for _ in equal:
        with pytest.raises(InjectedError):
            Worker(tmp_path, 0, *equal).steps(9, 9)
    Worker(tmp_path, 0, *equal).steps(9, 12)
    assert len(FaultRecord(tmp_path).read()) == 4


def test_fault_waits_for_rare_phase(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 0, 'raise_error(rank=0, step=3, phase="mirror")')
    worker.steps(1, 9)
    with pytest.raises(InjectedError, match="phase mirror of step 10"):
        worker.injector.on_phase("mirror", 10)


def test_slow_sleeps_once_per_step(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 0, "slow(rank=0, step=2, seconds=0.05, steps=3)")
    started_s = time.monotonic()
    worker.steps(1, 9)
    assert time.monotonic() - started_s >= 0.15
    assert [fired.step for fired in worker.posted] == [2, 3, 4]


def test_hang_is_reported_and_never_ends(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 0, "hang(rank=0, step=1)")
    thread = threading.Thread(target=worker.injector.on_phase, args=("forward", 1), daemon=True)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    assert len(worker.posted) == 1


def test_worker_injects_only_worker_faults(tmp_path: Path) -> None:
    texts = ["drop_node(node=0, step=1)", "kill_vault(node=0, step=1)", "slow_store(seconds=1)"]
    worker = Worker(tmp_path, 0, *texts)
    worker.steps(1, 3)
    assert FaultRecord(tmp_path).read() == ()
    assert [str(fault) for fault in worker.schedule.due(1)] == texts
    worker.schedule.record_fired(worker.schedule.due(1)[0], rank=0, step=1)  # by the controller
    assert [str(fault) for fault in worker.schedule.due(1)] == texts[1:]


def test_records_of_earlier_job_are_removed(tmp_path: Path) -> None:
    record = FaultRecord(tmp_path)
    record.retain_only(())
    record.add(FaultFired(0, 1, ERROR))
    record.add(FaultFired(0, 2, "kill(rank=0, step=2)"))
    record.retain_only({ERROR})
    assert FaultRecord(tmp_path).read() == (FaultFired(0, 1, ERROR),)
    record.retain_only(())
    assert FaultRecord(tmp_path).read() == ()


def test_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"faults\.jsonl cannot be written"):
        Worker(tmp_path / "missing", 0, ERROR.replace("rank=1", "rank=0")).steps(1, 9)


@pytest.mark.parametrize(
    ("how", "remaining"), [("flip", b"0123\x34" + b"6789"), ("cut", b"0123"), ("remove", None)]
)
def test_tear_file(tmp_path: Path, how: str, remaining: bytes | None) -> None:
    path = tmp_path / "rank-00001"
    path.write_bytes(b"012356789")
    damage_file(path, how)
    assert (path.read_bytes() if path.exists() else None) == remaining
    if how == "flip":
        damage_file(path, how)
        assert path.read_bytes() == b"012356789", "the second flip reverts the first"

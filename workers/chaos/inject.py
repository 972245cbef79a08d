"""Injects faults into workers and checkpoint stores, and records the injected faults.

The record is a file in the job's output folder: it outlives every process, and later processes read
from it which faults were injected. On several machines the folder must be shared.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from pathlib import Path

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.errors import ConfigError
from rayzero.workers.chaos.spec import FaultFired, FaultSpec

FAULT_RECORD_FILE = "faults.jsonl"


class InjectedError(RuntimeError):
    """Raised by `raise_error`; rayzero treats it like any exception of the user's code."""


class FaultRecord:
    """The record of a job's injected faults. Used by any process."""

    def __init__(self, output_dir: str | Path) -> None:
        self._path = Path(output_dir) / FAULT_RECORD_FILE

    def read(self) -> tuple[FaultFired, ...]:
        """Returns the injected faults, in order."""
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return ()
        return tuple(FaultFired(**json.loads(line)) for line in lines)

    def retain_only(self, faults: Collection[str]) -> None:
        """Removes all other faults, left by an earlier run. Called only at the start of a run.

        Raises:
            ConfigError: the folder cannot be written.
        """
        kept = [fired for fired in self.read() if fired.fault in faults]
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise self._write_error(error) from error
        for fired in kept:
            self.add(fired)

    def add(self, fired: FaultFired) -> None:
        """Appends a line by one system call, so that the line persists if the process dies next.

        Raises:
            ConfigError: the folder cannot be written.
        """
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(json.dumps(asdict(fired)).encode() + b"\n")
        except OSError as error:
            raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"the record of injected faults {self._path} cannot be written: {error.strerror}",
            allowed="a writable file in the job's output folder",
            fix="change `output_dir` in the job file, or remove `faults`",
        )


class FaultSchedule:
    """The faults that are still to be injected. Safe to use from any thread.

    The list may grow at any time (`set_faults`). A lock guards the remaining firings. It is held
    while a fault is recorded, so that no firing is counted twice or missed.
    """

    def __init__(self, record: FaultRecord, post: Callable[[FaultFired], None]) -> None:
        self._record = record
        self._post = post
        self._total_firings = 0
        self._remaining_firings: dict[FaultSpec, int] = {}
        self._lock = threading.Lock()

    def set_faults(self, faults: Iterable[FaultSpec]) -> None:
        """Replaces the list of all faults, and reads the record again.

        A job's list only grows: a shorter list than the current one is outdated, and ignored.
        """
        firings: Counter[FaultSpec] = Counter()
        for fault in faults:
            firings[fault] += fault.total_firings
        with self._lock:
            if firings.total() < self._total_firings:
                return
            done = Counter(fired.fault for fired in self._record.read())
            self._total_firings = firings.total()
            self._remaining_firings = {
                fault: count - done[str(fault)] for fault, count in firings.items()
            }

    def due(self, step: int) -> list[FaultSpec]:
        """Returns the faults whose step is reached and that have firings left."""
        with self._lock:
            firings = self._remaining_firings.items()
            return [fault for fault, count in firings if count > 0 and fault.step <= step]

    def record_fired(self, fault: FaultSpec, rank: int, step: int) -> None:
        """Records and reports a fault. Called before the fault takes effect. If the fault names a
        role, `rank` is the worker's number in the role."""
        fired = FaultFired(rank, step, str(fault), fault.role)
        with self._lock:
            self._remaining_firings[fault] -= 1
            self._record.add(fired)
        self._post(fired)


class WorkerFaultInjector:
    """Injects the faults of one rank in one generation. Used by the training thread."""

    def __init__(self, schedule: FaultSchedule, rank: int) -> None:
        self._schedule = schedule
        self._rank = rank
        self._slowed_steps: set[tuple[FaultSpec, int]] = set()  # a step is slowed only once

    def on_phase(self, phase: str, step: int) -> None:
        """Injects the faults that are due when the training thread enters a phase.

        Raises:
            InjectedError: `raise_error` is due.
        """
        for fault in self._schedule.due(step):
            if fault.target != "worker" or (fault.rank, fault.phase) != (self._rank, phase):
                continue
            if fault.kind == "slow":
                if (fault, step) in self._slowed_steps:
                    continue
                self._slowed_steps.add((fault, step))
            self._schedule.record_fired(fault, self._rank, step)
            match fault.kind:
                case "kill" | "stop":
                    signal_own_process(fault.kind)
                case "slow":
                    time.sleep(fault.seconds)
                case "hang":
                    threading.Event().wait()
                case "raise_error":
                    raise InjectedError(f"injected in phase {phase} of step {step}")


def signal_own_process(kind: str) -> None:
    """Injects a `kill` or `stop` into this process."""
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])


def inject_store_faults(schedule: FaultSchedule, folder: str, step: int, rank: int) -> None:
    """Injects the faults that are due before a rank's checkpoint file is written.

    Raises:
        StoreError: `full_disk` is due; the error is that of a full disk.
    """
    for fault in schedule.due(step):
        if fault.kind == "slow_store":
            schedule.record_fired(fault, rank, step)
            time.sleep(fault.seconds)
        elif fault.kind == "full_disk":
            schedule.record_fired(fault, rank, step)
            path = os.path.join(folder, f"rank-{rank:05d}")
            raise StoreError("full", path, os.strerror(errno.ENOSPC))


def damage_file(path: Path, how: str) -> None:
    """Damages a file: flips a bit in its middle, truncates it to half, or removes it."""
    middle = path.stat().st_size // 2
    if how == "remove":
        path.unlink()
    elif how == "cut":
        os.truncate(path, middle)
    else:
        with path.open("r+b") as file:
            file.seek(middle)
            byte = file.read(1)[0]
            file.seek(middle)
            file.write(bytes([byte ^ 1]))

"""Makes faults happen in a worker, and keeps the record of those that did.

The record is a file in the job's output folder, which outlives every process and tells the ones to
come what has happened already. On several machines that folder must be a shared one.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from rayzero.engine.errors import ConfigError
from rayzero.workers.chaos.spec import FaultFired, FaultSpec

FAULT_RECORD_FILE = "faults.jsonl"


class InjectedError(RuntimeError):
    """What `raise_error` raises: to rayzero, any exception of the user's code."""


class FaultRecord:
    """The faults of a job that happened so far, told by their text. Used by any process."""

    def __init__(self, output_dir: str | Path) -> None:
        self._path = Path(output_dir) / FAULT_RECORD_FILE

    def read(self) -> tuple[FaultFired, ...]:
        """What happened, in order."""
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return ()
        return tuple(FaultFired(**json.loads(line)) for line in lines)

    def retain_only(self, faults: Collection[str]) -> None:
        """Forgets what else an earlier run of the job left here. For the start of a run only.

        Raises:
            ConfigError: the folder cannot be written.
        """
        kept = "".join(_json_line(one) for one in self.read() if one.fault in faults)
        try:
            if kept:
                self._path.write_text(kept, encoding="utf-8")
            else:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            raise self._write_error(error) from error

    def add(self, fired: FaultFired) -> None:
        """Writes one line by one call, so that it is there even if the process dies right after.

        Raises:
            ConfigError: the folder cannot be written.
        """
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, _json_line(fired).encode())
            finally:
                os.close(file)
        except OSError as error:
            raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"the record of faults {self._path} cannot be written: {error.strerror}",
            fix="the job's output folder, or leave `faults` out",
        )


def _json_line(fired: FaultFired) -> str:
    return json.dumps({"rank": fired.rank, "step": fired.step, "fault": fired.fault}) + "\n"


def read_fired_faults(output_dir: str | Path) -> tuple[FaultFired, ...]:
    """The faults of a job that happened, in order."""
    return FaultRecord(output_dir).read()


class FaultSchedule:
    """Which faults of a list are still to come, by the record. For any thread.

    The list may grow while others look (`want`): one lock guards what is left, and a fault is
    recorded under it, so that nothing is counted twice or forgotten between.
    """

    def __init__(
        self, faults: Iterable[FaultSpec], record: FaultRecord, post: Callable[[FaultFired], None]
    ) -> None:
        self._record = record
        self._post = post
        self._total_firings = 0
        self._remaining_firings: dict[FaultSpec, int] = {}
        self._lock = threading.Lock()
        self.set_faults(faults)

    def set_faults(self, faults: Iterable[FaultSpec]) -> None:
        """Looks the record up again: these are all the faults that there are to be.

        Lists of one job only grow, so a shorter one than before was overtaken by a newer one.
        """
        wanted: Counter[FaultSpec] = Counter()
        for fault in faults:
            wanted[fault] += fault.total_firings
        with self._lock:
            if wanted.total() < self._total_firings:
                return
            done = Counter(one.fault for one in self._record.read())
            self._total_firings = wanted.total()
            self._remaining_firings = {
                fault: count - done[str(fault)] for fault, count in wanted.items()
            }

    @property
    def remaining(self) -> tuple[FaultSpec, ...]:
        """Those that have not happened as often as they should."""
        with self._lock:
            return tuple(fault for fault, left in self._remaining_firings.items() if left > 0)

    def due(self, step: int) -> tuple[FaultSpec, ...]:
        """Those whose step has come."""
        return tuple(fault for fault in self.remaining if fault.step <= step)

    def record_fired(self, fault: FaultSpec, rank: int, step: int) -> None:
        """Tells that a fault happens. Call it before it takes effect."""
        told = FaultFired(rank, step, str(fault))
        with self._lock:
            self._remaining_firings[fault] -= 1
            self._record.add(told)
        self._post(told)


class WorkerFaultInjector:
    """The faults of one rank in one generation. Used by the training thread, but for `close`."""

    def __init__(self, schedule: FaultSchedule, rank: int) -> None:
        self._schedule = schedule
        self._rank = rank
        self._slowed_steps: set[tuple[FaultSpec, int]] = (
            set()
        )  # a step is slowed once, however often entered
        self._closed = threading.Event()

    def on_phase(self, phase: str, step: int) -> None:
        """The training thread enters a phase of the step it works on.

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
            self._execute(fault, phase, step)

    def close(self) -> None:
        """Frees a thread that hangs or sleeps in here. Call it only when the process is to end."""
        self._closed.set()

    def _execute(self, fault: FaultSpec, phase: str, step: int) -> None:
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                self._closed.wait(fault.seconds)
            case "hang":
                self._closed.wait()
            case "raise_error":
                raise InjectedError(f"injected in phase {phase} of step {step}")


class StoreFaultInjector:
    """The faults of whoever writes checkpoint files. Used by one thread."""

    def __init__(self, schedule: FaultSchedule) -> None:
        self._schedule = schedule
        self._closed = threading.Event()

    def before_write(self, step: int, rank: int) -> None:
        """A rank's file of that step's checkpoint is about to be written.

        Raises:
            OSError: ENOSPC, as a full disk gives it.
        """
        for fault in self._schedule.due(step):
            if fault.kind == "slow_store":
                self._schedule.record_fired(fault, rank, step)
                self._closed.wait(fault.seconds)
            elif fault.kind == "full_disk":
                self._schedule.record_fired(fault, rank, step)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def after_commit(self, step: int, paths: dict[int, Path]) -> None:
        """A checkpoint of that step is durable; `paths` are its local files, by rank."""
        for fault in self._schedule.due(step):
            path = paths.get(fault.rank)
            if fault.kind == "tear_file" and path is not None:
                self._schedule.record_fired(fault, fault.rank, step)
                damage_file(path, fault.how)

    def close(self) -> None:
        """Frees a thread that sleeps in here."""
        self._closed.set()


def damage_file(path: Path, how: str) -> None:
    """Damages a file: flips a bit in its middle, cuts its second half off, or removes it."""
    if how == "remove":
        path.unlink()
        return
    middle = path.stat().st_size // 2
    with path.open("r+b") as file:
        if how == "cut":
            file.truncate(middle)
            return
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))

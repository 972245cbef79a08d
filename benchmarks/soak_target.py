"""A running job of the soak test, for the faults that are inflicted on it from outside."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from benchmarks.faults import process_start_time
from benchmarks.soak_control import RankState, SoakControl
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.results import JobStatus
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired
from tests.support.durable_head import DurableHead

T = TypeVar("T")

POLL_INTERVAL_S = 0.05
REPAIR_TIMEOUT_S = 90.0
"""Until all workers train again: a replacement takes seconds to start, and may be delayed."""


class JobEndedError(Exception):
    """The job ended while an inflicting function waited for it."""


class NotHeldError(Exception):
    """The job did not bear a disruption as it must; the text says what was seen."""


@dataclass
class Target:
    """The job that a disruption is inflicted on. Used by the runner's thread.

    Args:
        job_dir: the job's folder: its output, journal, lease, ledger, and `step-*` checkpoints.
        control: what the ranks report, and requests to the training function.
        workers_expected: workers of the job when nothing is missing.
        ended: set when the job has ended.
        root_pid: the process whose descendants are the job's cluster.
        submit_again: starts a second submission of the job; returns its process.
        head: the cluster, if its head can be lost and come back.
    """

    job_dir: Path
    control: SoakControl
    workers_expected: int
    ended: threading.Event
    submit_again: Callable[[], int]
    head: DurableHead | None = None
    root_pid: int = field(default_factory=os.getpid)
    text: str = ""
    """The disruption in progress, such as `attack_store(step=7)`."""
    _handle: JobHandle | None = None

    def workers(self) -> list[int]:
        """Process ids of the workers, with spare ones and those that start."""
        return self.processes("ray::WorkerActor")

    def vaults(self) -> list[int]:
        return self.processes("ray::VaultActor")

    def controllers(self) -> list[int]:
        """The process of the job, which Ray calls `JobActor`."""
        return self.processes("ray::JobActor")

    def role_workers(self) -> list[int]:
        """Of all roles."""
        return self.processes("ray::RoleActor")

    def on_submitted(self, handle: JobHandle) -> None:
        self._handle = handle

    def scale(self, workers: tuple[int, int], role: str = "") -> None:
        """See `JobHandle.scale`. Tries again where the job's process is just started again."""
        self._ask(lambda handle: handle.scale(workers, role))

    def status(self) -> JobStatus:
        return self._ask(JobHandle.status)

    def _ask(self, call: Callable[[JobHandle], T]) -> T:
        while True:
            try:
                if self._handle is not None:
                    return call(self._handle)
            except JobFailedError:
                pass
            if self.ended.wait(POLL_INTERVAL_S):
                raise JobEndedError

    def processes(self, title: str) -> list[int]:
        """Live processes of the job's cluster whose title starts so, oldest first."""
        found = []
        with suppress(psutil.Error):
            for process in psutil.Process(self.root_pid).children(recursive=True):
                with suppress(psutil.Error):
                    if " ".join(process.cmdline()).startswith(title):  # a zombie's is empty
                        found.append((process.create_time(), process.pid))
        return [pid for _, pid in sorted(found)]

    def ranks(self) -> list[RankState]:
        """The live ranks with their process, finished steps and world size, by rank."""
        own = set(self.workers())
        return [state for state in self.control.ranks() if state.pid in own]

    def step(self) -> int:
        """Finished steps; 0 before the first."""
        return max((state.step for state in self.ranks()), default=0)

    def injected(self) -> int:
        """Faults that the product's own injector has fired."""
        return len(FaultRecord(self.job_dir).read())

    def mark_fired(self) -> None:
        """Records that the disruption has taken effect, once; the runner does so at the latest
        after the inflicting function has returned. The training function waits for it."""
        if self.text not in {fired.fault for fired in self.control.record.read()}:
            self.control.record.add(FaultFired(-1, self.step(), self.text))

    def take_over(self) -> None:
        """Submits the job a second time, in a cluster of its own that takes this machine for
        another one. It waits for the lease. From now on it is the job: the methods above list its
        processes, and its result is the episode's. At most once in an episode."""
        self.root_pid = self.submit_again()

    def kill(self, pid: int, signal_number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)

    def is_alive(self, pid: int) -> bool:
        return process_start_time(pid) is not None

    def wait(self, condition: Callable[[], object], timeout_s: float, expected: str) -> None:
        """Raises JobEndedError when the job ends first, NotHeldError after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if self.ended.wait(POLL_INTERVAL_S):
                raise JobEndedError
            if time.monotonic() > deadline_s:
                raise NotHeldError(f"{self.text}: {expected} did not occur within {timeout_s:g} s")

    def wait_for_step(self, step: int, timeout_s: float = REPAIR_TIMEOUT_S) -> None:
        self.wait(lambda: self.step() >= step, timeout_s, f"step {step}")

    def wait_until_repaired(self, timeout_s: float = REPAIR_TIMEOUT_S) -> None:
        """Until every rank of a full generation has finished two more steps than any has now."""
        step = self.step() + 2
        self.wait(lambda: self._is_complete(step), timeout_s, f"training of all ranks at {step}")

    def wait_for_generation(self, least: int = 2) -> list[RankState]:
        """Until a generation of at least so many ranks trains; returns its ranks."""
        self.wait(
            lambda: len(self._generation()) >= least, REPAIR_TIMEOUT_S, f"{least} training ranks"
        )
        return self._generation() or self.wait_for_generation(least)

    def _generation(self) -> list[RankState]:
        """The ranks of the newest generation, if it is complete."""
        for size in range(self.workers_expected, 0, -1):
            by_rank = {state.rank: state for state in self.ranks() if state.world_size == size}
            if len(by_rank) == size:
                return list(by_rank.values())
        return []

    def _is_complete(self, step: int) -> bool:
        states = self._generation()
        return len(states) == self.workers_expected and min(s.step for s in states) >= step

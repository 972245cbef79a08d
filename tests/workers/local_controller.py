"""A minimal controller over `LocalWorkers`: repairs a job's generations until it has finished.

It is the tests', not the product's: it kills what is stopped, fences, and continues from the newest
step that all ranks have in the vault. It complains about every finished step that is lost.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import psutil

from rayzero.workers.messages import Crashed, Finished, StepReport, Stopped, WorkerMessage
from rayzero.workers.vault.records import Restore
from tests.workers.local_workers import ENDED, LocalWorkers

STOPPED_S = 1.0
"""How long a process may be stopped before it is killed."""
LOST = (EOFError, ConnectionError, TimeoutError)


class LocalController:
    """Runs one job.

    Attributes:
        wrong: what a repair lost, or took for an error of the function.
        repairs_s: from a fault's detection to the next generation's first reported step.
    """

    def __init__(self, local: LocalWorkers) -> None:
        self.wrong: list[str] = []
        self.repairs_s: list[float] = []
        self._local = local
        self._members = sorted(local.workers)
        self._ending = threading.Event()
        self._detected_s = 0.0
        self._generation_members = self._members

    def run(self, timeout_s: float) -> None:
        """Returns when the job has finished on all ranks, or with something in `wrong`."""
        deadline_s = time.monotonic() + timeout_s
        watch = threading.Thread(target=self._kill_stopped, daemon=True)
        watch.start()
        try:
            restore: Restore | None = None
            generation = 0
            while self._members and not self.wrong:
                generation += 1
                self._choose_members(restore)
                with suppress(*LOST):  # a member has just been killed: found below
                    self._local.form(generation, self._members, restore)
                if self._wait(generation, deadline_s):
                    return
                self._detected_s = time.monotonic()
                world_size = len(self._members)
                self._fence(generation)
                restore = self._newest(generation, world_size, restore)
            if not self._members:
                self.wrong.append("no worker is left")
        finally:
            self._ending.set()
            watch.join()

    def _choose_members(self, restore: Restore | None) -> None:
        """Before a generation that starts from `restore`; `_members` are those that are left."""

    def _act(self, generation: int) -> None:
        """Called again and again while a generation runs."""

    def _kill_stopped(self) -> None:
        """Pipes to a stopped process would block for ever."""
        since: dict[int, float] = {}
        while not self._ending.wait(0.1):
            for worker in list(self._local.workers.values()):
                with suppress(psutil.Error, ProcessLookupError):
                    if psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED:
                        since.pop(worker.pid, None)
                    elif time.monotonic() - since.setdefault(worker.pid, time.monotonic()) > (
                        STOPPED_S
                    ):
                        os.kill(worker.pid, signal.SIGKILL)

    def _wait(self, generation: int, deadline_s: float) -> bool:
        """True when all have finished; False at the first fault, with the lost ones removed."""
        while time.monotonic() < deadline_s:
            ends = [self._poll(index, generation) for index in list(self._members)]
            self._act(generation)
            if all(isinstance(end, Finished) for end in ends):
                return True
            if any(end is None or isinstance(end, Crashed | Stopped) for end in ends):
                return False
        self.wrong.append(f"generation {generation} did not end: {self._local.texts(0)[-3:]}")
        return False

    def _poll(self, index: int, generation: int) -> Any:
        """The end of a member's generation; False before it, None if its process is lost."""
        seen = self._local.seen[index]
        try:
            seen += self._local.workers[index].call("poll", 0.02)
        except LOST:
            return None
        if self._detected_s and any(
            isinstance(one, StepReport) and one.generation == generation for one in seen
        ):
            self.repairs_s.append(time.monotonic() - self._detected_s)
            self._detected_s = 0.0
        return next((end for end in seen if _ends(end, generation)), False)

    def _fence(self, generation: int) -> None:
        """Ends the generation on all ranks; those that are lost, or have no device, are dropped."""
        for index in self._members:
            with suppress(*LOST):
                self._local.workers[index].call("fence", generation)
        survivors = []
        for index in self._members:
            try:
                end = self._local.wait_end(index, generation)
            except LOST:
                continue
            except AssertionError as error:
                self.wrong.append(f"worker {index} did not leave: {error!s:.500}")
                continue
            if isinstance(end, Crashed) and end.kind == "device":
                self._local.kill(index)
                continue
            if isinstance(end, Crashed) and end.kind != "collective":
                self.wrong.append(f"worker {index}: {end.kind}: {end.error} {end.traceback}")
            survivors.append(index)
        self._generation_members = self._members
        self._members = survivors

    def _newest(self, generation: int, world_size: int, before: Restore | None) -> Restore | None:
        """What the next generation starts from; checked against what was reported."""
        reported = [
            max(
                (
                    message.step
                    for message in self._local.seen[index]
                    if isinstance(message, StepReport) and message.generation == generation
                ),
                default=0,
            )
            for index in self._generation_members
        ]
        has_steps = self._local.newest_step(generation, world_size) is not None
        restore = self._local.slots(generation, world_size) if has_steps else before
        step = restore.step if restore else 0
        if min(reported) > step:
            self.wrong.append(f"step {min(reported)} was reported by all, restored is {step}")
        if max(reported) > step + 1:
            self.wrong.append(f"step {max(reported)} was reported by a rank, restored is {step}")
        return restore


def _ends(message: WorkerMessage, generation: int) -> bool:
    return isinstance(message, ENDED) and message.generation == generation

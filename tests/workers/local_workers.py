"""A job's workers as plain processes with a vault, and the least of a controller: without Ray."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rayzero.workers.messages import (
    Crashed,
    Finished,
    GenerationSpec,
    LogLine,
    RankAssignment,
    StepReport,
    Stopped,
    WorkerMessage,
    WorkerSpec,
)
from rayzero.workers.vault.records import Restore, SlotRef
from rayzero.workers.vault.vault import Vault
from tests.support.processes import PROCESSES

NODE = "node"
ENDED = (Stopped, Crashed, Finished)


class LocalWorkers:
    """Workers by index. A test drives it by hand; `close` ends everything."""

    def __init__(self, setup: WorkerSpec, count: int) -> None:
        self.vault = Vault("job", NODE, nowhere)
        self.setup = setup
        self.workers: dict[int, _Worker] = {}
        self.seen: dict[int, list[WorkerMessage]] = {}
        for _ in range(count):
            self.start_worker()

    def start_worker(self) -> int:
        """A new worker; its index."""
        index = len(self.seen)
        self.workers[index] = _Worker(self.setup, index)
        self.seen[index] = []
        self.workers[index].call("warm_up")
        return index

    def form(
        self,
        generation: int,
        members: Sequence[int],
        restore: Restore | None = None,
        told: Sequence[int] | None = None,
    ) -> None:
        """Begins a generation; only those in `told` hear of it."""
        port = self.workers[members[0]].call("open_store")
        for rank, index in enumerate(members):
            if told is not None and index not in told:
                continue
            self.workers[index].call(
                "assign",
                GenerationSpec(generation, len(members), "127.0.0.1", port, restore),
                RankAssignment(rank, rank, len(members), self.vault.address()),
            )

    def wait(
        self, index: int, wanted: Callable[[WorkerMessage], bool], timeout_s: float = 240.0
    ) -> WorkerMessage:
        """Polls one worker until such a message comes."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            for message in self.workers[index].call("poll", 0.5):
                self.seen[index].append(message)
            for message in self.seen[index]:
                if wanted(message):
                    return message
        raise AssertionError(f"worker {index} sent {self.texts(index)}")

    def wait_end(self, index: int, generation: int) -> WorkerMessage:
        def ended(message: WorkerMessage) -> bool:
            return isinstance(message, ENDED) and message.generation == generation

        return self.wait(index, ended)

    def wait_step(self, index: int, generation: int, step: int) -> None:
        """Until one has finished that step: a death may be noticed before its peers have."""

        def finished(message: WorkerMessage) -> bool:
            mine = isinstance(message, StepReport) and message.generation == generation
            return mine and message.step >= step

        self.wait(index, finished, 200.0)

    def kill(self, index: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.workers[index].pid, number)

    def slots(self, generation: int, world_size: int) -> Restore:
        """The newest step that all ranks of a generation have in the vault."""
        found: dict[int, set[int]] = {}
        for one in self.vault.inventory():
            if one.generation == generation:
                found.setdefault(one.step, set()).add(one.rank)
        step = max(step for step, ranks in found.items() if len(ranks) == world_size)
        refs = tuple(SlotRef(generation, rank, step, NODE) for rank in range(world_size))
        return Restore(step, refs)

    def texts(self, index: int) -> list[str]:
        return [
            one.text if isinstance(one, LogLine) else str(one)[:2000] for one in self.seen[index]
        ]

    def close(self) -> None:
        for worker in self.workers.values():
            worker.end()
        self.vault.close()


class _Worker:
    """One process with a WorkerProcess in it; calls are answered by threads there."""

    def __init__(self, setup: WorkerSpec, index: int) -> None:
        ours, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_serve, args=(theirs, setup, index), daemon=True)
        self._process.start()
        theirs.close()
        self._end: Connection = ours
        self.pid = self._process.pid or 0

    def call(self, name: str, *args: Any) -> Any:
        self._end.send((name, args))
        if not self._end.poll(240):
            raise TimeoutError(f"{name} took too long")
        good, answer = self._end.recv()
        if not good:
            raise answer
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._end.close()


def nowhere(*args: Any) -> Any:
    """There are no other nodes."""
    raise AssertionError(args)


def _serve(end: Connection, setup: WorkerSpec, index: int) -> None:
    from rayzero.workers.worker import WorkerProcess

    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    host = WorkerProcess(setup, index)
    while True:
        try:
            name, args = end.recv()
        except EOFError:
            sys.exit(0)
        try:
            end.send((True, getattr(host, name)(*args)))
        except Exception as error:  # noqa: BLE001
            end.send((False, error))


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)

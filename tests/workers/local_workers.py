"""A job's workers as plain processes with a vault and a minimal controller, without Ray."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from rayzero.engine.data.sample_ledger import Order, check_ledger
from rayzero.engine.data.sampling import SampleOrder
from rayzero.orchestrator.policies.placement import CallState, FunctionCall, misplaced
from rayzero.orchestrator.progress import JobProgress
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultSpec
from rayzero.workers.messages import (
    SCRIPT_ENTRYPOINT,
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
from rayzero.workers.step_rows import combine
from rayzero.workers.vault.records import Restore, SlotRef
from rayzero.workers.vault.vault import Vault
from tests.support.nccl_like.settings import NcclLike, from_environment
from tests.support.processes import PROCESSES, start_launched
from tests.workers import recovery_jobs

NODE = "node"
ENDED = (Stopped, Crashed, Finished)


class LocalWorkers:
    """Workers by index. The test makes the controller's calls; `close` kills all workers.

    Args:
        nccl_like: gives them the NCCL-like backend instead of gloo; by default the environment's.
    """

    def __init__(self, setup: WorkerSpec, count: int, nccl_like: NcclLike | None = None) -> None:
        self.nccl_like = nccl_like or from_environment()
        self.vault = Vault("job", NODE, no_other_nodes)
        self.setup = setup
        self.workers: dict[int, _Worker] = {}
        self.seen: dict[int, list[WorkerMessage]] = {}
        self.faults: tuple[FaultSpec, ...] = ()
        """That were injected while the job runs."""
        self._calls: dict[int, FunctionCall] = {}
        self._ahead = set[int]()
        for _ in range(count):
            self.start_worker()

    def start_worker(self) -> int:
        """Start a worker and return its index."""
        index = len(self.seen)
        self.workers[index] = _Worker(self.setup, index, self.nccl_like)
        self.seen[index] = []
        self.workers[index].call("warm_up")
        return index

    def form(
        self,
        generation: int,
        members: Sequence[int],
        restore: Restore | None = None,
        recipients: Sequence[int] | None = None,
    ) -> None:
        """Start a generation, only on `recipients` if given."""
        address = self.vault.address()
        places = {
            index: RankAssignment(rank, rank, len(members), address)
            for rank, index in enumerate(members)
        }
        staying = {index for index in members if restore and self._left(index, "stays")}
        calls = {
            index: self._calls[index].come_to(
                CallState.WAITING, keeps_rank=self._left(index, "keeps_rank")
            )
            for index in staying
        }
        staying -= {*misplaced(places, calls)}
        ahead = {index for index in members if staying and index in self._ahead}
        self._ahead -= {*members}
        for index in set(places) - staying - ahead:
            if index in self._calls:
                self._renew(index)
            self._calls[index] = FunctionCall(places[index].rank, len(members))
        port = self.workers[members[0]].call("open_store")
        spec = GenerationSpec(
            generation,
            len(members),
            "127.0.0.1",
            port,
            restore,
            faults=self.faults,
            survivors_stay=bool(staying),
            notes=self._notes(generation, restore),
        )
        for index in members:
            if recipients is not None and index not in recipients:
                continue
            self.workers[index].call("assign", spec, places[index])

    def prepare(self, index: int, rank: int, world_size: int) -> None:
        """Call a new worker's function ahead of its generation."""
        spec = GenerationSpec(
            0, world_size, "", 0, faults=self.faults, survivors_stay=True, is_ahead=True
        )
        self._ahead.add(index)
        self._calls[index] = FunctionCall(rank, world_size)
        place = RankAssignment(rank, rank, world_size, self.vault.address())
        self.workers[index].call("assign", spec, place)

    def _notes(self, generation: int, restore: Restore | None) -> bytes:
        """What the lowest rank that left before `generation` tells, with the restored state."""
        ends = [it for messages in self.seen.values() for it in messages if isinstance(it, ENDED)]
        newest = max((end.generation for end in ends if end.generation < generation), default=0)
        for end in sorted(ends, key=lambda end: end.rank):
            notes = getattr(end, "notes", None)
            if end.generation == newest and notes and restore and notes.step == restore.step:
                return notes.content
        return b""

    def _renew(self, index: int) -> None:
        """A new process, in place of one whose function does not continue."""
        self.workers[index].end()
        self.workers[index] = _Worker(self.setup, index, self.nccl_like)
        self.workers[index].call("warm_up")

    def _left(self, index: int, name: str) -> bool:
        """What the worker's last message of an end says of its function."""
        ends = [message for message in self.seen[index] if isinstance(message, ENDED)]
        return bool(ends) and getattr(ends[-1], name, False)

    def wait(
        self, index: int, matches: Callable[[WorkerMessage], bool], timeout_s: float = 240.0
    ) -> WorkerMessage:
        """Poll a worker until a message matches."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for message in self.workers[index].call("poll", 0.5):
                self.seen[index].append(message)
            for message in self.seen[index]:
                if matches(message):
                    return message
        raise AssertionError(f"worker {index} sent {self.texts(index)}")

    def wait_end(self, index: int, generation: int) -> WorkerMessage:
        def ended(message: WorkerMessage) -> bool:
            return isinstance(message, ENDED) and message.generation == generation

        return self.wait(index, ended)

    def wait_step(self, index: int, generation: int, step: int) -> None:
        """Wait until a worker has finished a step, possibly after another worker died."""

        def finished(message: WorkerMessage) -> bool:
            if not isinstance(message, StepReport) or message.generation != generation:
                return False
            return message.step >= step

        self.wait(index, finished, 200.0)

    def wait_lost(self, timeout_s: float = 200) -> int:
        """The worker that the vault reports as lost."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for loss in self.vault.poll(0.5):
                return loss.worker
        raise AssertionError("the vault reported no loss")

    def wait_fired(self, timeout_s: float = 200) -> None:
        """Wait until a fault has been injected."""
        deadline_s = time.monotonic() + timeout_s
        while not self.fired_steps():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)

    def fired_steps(self) -> list[int]:
        return [fired.step for fired in FaultRecord(self.setup.output_dir).read()]

    def fence(self, generation: int, members: Sequence[int]) -> dict[int, Any]:
        """The ends of a generation that survivors leave: whoever has seen its group fail before the
        fence came has ended with that."""
        for index in members:
            self.workers[index].call("fence", generation)
        ends = {index: self.wait_end(index, generation) for index in members}
        for index, end in ends.items():
            group_failed = isinstance(end, Crashed) and end.kind == "collective"
            assert isinstance(end, Stopped) or group_failed, self.texts(index)
        return ends

    def drain(self, generation: int, members: Sequence[int], told: Sequence[int]) -> list[Any]:
        """The ends of a generation that is drained at the request of the workers in `told`."""
        for index in told:
            self.workers[index].call("drain", generation)
        ends = [self.wait_end(index, generation) for index in members]
        assert all(isinstance(end, Stopped) for end in ends), ends
        return ends

    def finish(
        self, generation: int, members: Sequence[int], restore: Restore | None = None
    ) -> None:
        """Runs a generation that trains to the end."""
        self.form(generation, members, restore)
        for index in members:
            end = self.wait_end(index, generation)
            assert isinstance(end, Finished), {each: self.texts(each) for each in members}

    def read_until_lost(self, index: int) -> None:
        """Poll a worker that is to be killed: what it has told before is then known."""
        with suppress(EOFError, ConnectionError):
            while True:
                self.seen[index] += self.workers[index].call("poll", 0.5)

    def told_steps(self, starts: Sequence[tuple[int, int]]) -> list[int]:
        """The steps whose ends a job's user is told, in order; with metrics, checkpoints and calls
        of observers, which all are of these records.

        Args:
            starts: of each generation, its world size and the step that it starts from.
        """
        progress, steps = JobProgress(), []
        for generation, (world_size, start) in enumerate(starts, start=1):
            records = progress.start_generation(generation, world_size, start)
            reports = [
                message
                for messages in self.seen.values()
                for message in messages
                if isinstance(message, StepReport) and message.generation == generation
            ]
            rows = [combine([it.rank], [it]) for it in sorted(reports, key=lambda it: it.step)]
            records += filter(None, map(progress.add_rows, rows))
            steps += [record.step for record in records]
        return steps

    def kill(self, index: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.workers[index].pid, number)

    def slots(self, generation: int, world_size: int) -> Restore:
        """The newest step that all ranks of a generation have in the vault."""
        step = self.newest_step(generation, world_size)
        assert step is not None, self.vault.inventory()
        refs = tuple(SlotRef(generation, rank, step, NODE) for rank in range(world_size))
        return Restore(step, refs)

    def newest_step(self, generation: int, world_size: int) -> int | None:
        """That step; None if there is none."""
        ranks_by_step: dict[int, set[int]] = {}
        for slot in self.vault.inventory():
            if slot.generation == generation:
                ranks_by_step.setdefault(slot.step, set()).add(slot.rank)
        complete = [step for step, ranks in ranks_by_step.items() if len(ranks) == world_size]
        return max(complete, default=None)

    def texts(self, index: int) -> list[str]:
        return [
            message.text if isinstance(message, LogLine) else str(message)[:2000]
            for message in self.seen[index]
        ]

    def close(self) -> None:
        for worker in self.workers.values():
            worker.end()
        self.vault.close()


class _Worker:
    """A process with a WorkerProcess, which executes calls one by one."""

    def __init__(self, setup: WorkerSpec, index: int, nccl_like: NcclLike | None) -> None:
        parent, child = PROCESSES.Pipe()
        args = child, setup, index, nccl_like
        if setup.entrypoint == SCRIPT_ENTRYPOINT:
            self._process: BaseProcess = start_launched(_serve, args)
        else:
            self._process = PROCESSES.Process(target=_serve, args=args, daemon=True)
            self._process.start()
        child.close()
        self._connection: Connection = parent
        self.pid = self._process.pid or 0

    def call(self, name: str, *args: Any) -> Any:
        self._connection.send((name, args))
        if not self._connection.poll(240):
            raise TimeoutError(f"{name} took too long")
        succeeded, result = self._connection.recv()
        if not succeeded:
            raise result
        return result

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._connection.close()


def no_other_nodes(*args: Any) -> Any:
    """The `fetch` of a vault without peers."""
    raise AssertionError(args)


def _serve(
    connection: Connection, setup: WorkerSpec, index: int, nccl_like: NcclLike | None
) -> None:
    if nccl_like is not None:
        from tests.support.nccl_like.install import install

        install(nccl_like)
    from rayzero.workers.worker import WorkerProcess

    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    gc.disable()  # as in an actor's process
    host = WorkerProcess(setup, index)
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            sys.exit(0)
        try:
            connection.send((True, getattr(host, name)(*args)))
        except Exception as error:  # noqa: BLE001
            connection.send((False, error))
        if name == "warm_up":
            gc.freeze()
            gc.enable()


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


STEPS = 12


def check_results(local: LocalWorkers, steps: int = STEPS, order: Order | None = None) -> None:
    """The weights are plain torch's, and every sample was consumed once. `order` of the numbers in
    the ledger: by default the dataset's."""
    check_weights(local, steps)
    folder = local.setup.output_dir
    order = order or SampleOrder(recovery_jobs.LENGTH, local.setup.seed)
    assert check_ledger(f"{folder}/ledger", order, recovery_jobs.SAMPLES) == []


def check_weights(local: LocalWorkers, steps: int = STEPS) -> None:
    """The weights, and the mean of them that each rank of the last generation has kept, if any."""
    weights, ema = recovery_jobs.oracle_with_ema(steps)
    folder = Path(local.setup.output_dir)
    files = [(folder / "weights.pt", weights), *((it, ema) for it in folder.glob("ema-*.pt"))]
    for path, expected in files:
        values = torch.load(path, weights_only=True)
        for name, value in expected.items():
            assert torch.allclose(values[name], value, rtol=1e-9, atol=1e-12), (path.name, name)


LOADED = re.compile(r"step (\d+): (\d+) bytes were moved .* (\d+) copied, (\d+) read")


def read_loads(folder: str, rank: int) -> list[tuple[int, ...]]:
    """The step, and the bytes moved, copied and read, of each re-cut engine that a rank's log of
    `recovery_jobs.log_to_file` tells of."""
    path = Path(folder, f"kept-{rank}")
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(map(int, match.groups())) for match in map(LOADED.match, lines) if match]

"""A trainer's processes on rollouts through faults: of a rank, of the buffer, of generators.

Real workers and a vault, without Ray; buffer and generators are in the test's process. The sample
ledger tells what each step has trained on; the weights' oracle is plain torch over that.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from threading import Event, Thread

import pytest
import torch

from rayzero.engine.data.sample_ledger import read_ledger
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.messages import Heartbeat, StepReport
from rayzero.workers.rollouts.address import BufferAddress
from rayzero.workers.rollouts.ledger import RolloutPlan
from rayzero.workers.rollouts.server import RolloutServer
from rayzero.workers.rollouts.tasks import Tasks
from rayzero.workers.vault.records import Restore
from tests.workers.local_controller import LOST, LocalController
from tests.workers.local_workers import LocalWorkers
from tests.workers.recovery_jobs import SAMPLES, engine_config
from tests.workers.rollouts.jobs import GROUP, LIMIT_S, make_sample, plain_torch, write_address
from tests.workers.support import mirrored_setup

STEPS, LAG, HOST = 8, 1, "127.0.0.1"
COURSES = int(os.environ.get("RAYZERO_ROLLOUT_COURSES", "3"))
pytestmark = pytest.mark.slow


class Buffer:
    """The present buffer, whose address workers read from the job's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        batch = SAMPLES // GROUP
        self._plan = RolloutPlan(batch, GROUP, LAG, prompts=STEPS * batch)
        self.started = 0
        self.start()

    def start(self) -> None:
        self.started += 1
        secret = secrets.token_bytes(32)
        self.server = RolloutServer(self._plan, HOST, LIMIT_S)
        self.server.admit(secret)
        self.address = BufferAddress(HOST, self.server.port, secret)
        write_address(self._folder, self.address)

    def replace(self) -> None:
        self.server.close()
        self.start()


class Stopped(Exception):  # noqa: N818 -- as SystemExit
    """The generator is to end."""


@contextmanager
def generating(buffer: Buffer, may_work: Event) -> Iterator[None]:
    """Two generators, which pause while they may not work."""
    stop = Event()

    def check() -> None:
        if stop.is_set():
            raise Stopped

    def generate(worker: int) -> None:
        try:
            for task in Tasks(lambda: buffer.address, worker, 0, GROUP, LIMIT_S, check, 2):
                while not may_work.wait(0.01):
                    check()
                task.done(
                    [[make_sample(it, member) for member in range(GROUP)] for it in task.prompts]
                )
        except Stopped:
            pass

    threads = [Thread(target=generate, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(LIMIT_S)


class RolloutController(LocalController):
    """Publishes the steps that all ranks have mirrored.

    Args:
        act: called again and again with the generation and the published step.
    """

    def __init__(
        self, local: LocalWorkers, buffer: Buffer, act: Callable[[int, int], None]
    ) -> None:
        super().__init__(local)
        self._buffer = buffer
        self._act_of_test = act
        self._start_step = 0

    def _choose_members(self, restore: Restore | None) -> None:
        self._start_step = restore.step if restore else 0

    def _newest(self, generation: int, world_size: int, before: Restore | None) -> Restore | None:
        """Also of a generation that has not mirrored a step."""
        if self._local.newest_step(generation, world_size) is None:
            return before
        return super()._newest(generation, world_size, before)

    def _act(self, generation: int) -> None:
        steps = [
            max(
                (
                    it.step
                    for it in self._local.seen[index]
                    if isinstance(it, StepReport) and it.generation == generation
                ),
                default=self._start_step,
            )
            for index in self._members
        ]
        self._buffer.server.publish(generation, min(steps))
        self._act_of_test(generation, min(steps))


class Job:
    """Some workers on rollouts."""

    def __init__(
        self, folder: Path, stage: int, faults: tuple[str, ...] = (), workers: int = 2
    ) -> None:
        spec = mirrored_setup(
            folder,
            "tests.workers.rollouts.jobs:train",
            engine_config=engine_config(stage),
            faults=faults,
            steps=STEPS,
        )
        self.folder = folder
        self.faults = faults
        self.buffer = Buffer(folder)
        self.may_work = Event()
        self.may_work.set()
        self.local = LocalWorkers(spec, workers)

    def run(self, act: Callable[[int, int], None] = lambda generation, step: None) -> None:
        try:
            with generating(self.buffer, self.may_work):
                controller = RolloutController(self.local, self.buffer, act)
                controller.run(240)
            assert controller.wrong == []
            self.check()
        finally:
            self.local.close()
            self.buffer.server.close()

    def check(self) -> None:
        """Every prompt was trained on once, and the weights are a function of the log."""
        fired = [record.fault for record in FaultRecord(self.folder).read()]
        assert sorted(fired) == sorted(self.faults)
        steps = read_ledger(self.folder / "ledger")
        assert sorted(steps) == [*range(1, STEPS + 1)]
        numbers = [number for step in sorted(steps) for number in steps[step]]
        assert sorted(numbers) == [*range(STEPS * SAMPLES)]
        weights = torch.load(self.folder / "weights.pt", weights_only=True)
        log = [steps[step] for step in sorted(steps)]
        for name, expected in plain_torch(log, self.local.setup.seed).items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-9, atol=1e-12)

    def fence(self, generation: int) -> None:
        for worker in self.local.workers.values():
            with suppress(*LOST):
                worker.call("fence", generation)

    def phases(self) -> list[str]:
        """What the ranks do, by their last signs of life."""
        beats = [
            [it.phase for it in seen if isinstance(it, Heartbeat)][-1:]
            for seen in self.local.seen.values()
        ]
        return [phase for last in beats for phase in last]


@pytest.mark.parametrize(
    ("stage", "faults"),
    [
        (1, ('kill(rank=1, step=3, phase="reduce")',)),
        (3, ('kill(rank=0, step=2, phase="data")',)),
        (2, ('kill(rank=1, step=5, phase="mirror")',)),
    ],
)
def test_a_rank_is_lost(tmp_path: Path, stage: int, faults: tuple[str, ...]) -> None:
    Job(tmp_path, stage, faults).run()


def test_ranks_that_wait_for_samples_leave_when_they_are_fenced(tmp_path: Path) -> None:
    """Generators make nothing any more; a rank is lost; the other one waits in the next generation,
    and goes on with the generators."""
    job = Job(tmp_path, 2)
    was_killed = Event()

    def act(generation: int, step: int) -> None:
        if step >= 2 and generation == 1:
            job.may_work.clear()
        elif generation == 2 and job.phases()[0] == "data":
            job.may_work.set()
        is_starving = job.buffer.server.counts().ready == 0
        waits = is_starving and job.phases() == ["data", "data"]
        if waits and not job.may_work.is_set() and not was_killed.is_set():
            was_killed.set()
            job.local.kill(1)

    job.run(act)
    assert was_killed.is_set()


@pytest.mark.parametrize("with_rank", [True, False])
def test_the_buffer_is_lost(tmp_path: Path, with_rank: bool) -> None:
    """With the node of rank 0, or alone: then the trainer's generation ends with it."""
    job = Job(tmp_path, 1)

    def act(generation: int, step: int) -> None:
        if step >= 3 and job.buffer.started == 1:
            job.buffer.replace()
            if with_rank:
                job.local.kill(0)
            else:
                job.fence(generation)

    job.run(act)
    assert job.buffer.started == 2


@pytest.mark.parametrize("seed", range(COURSES))
def test_random_courses(tmp_path: Path, seed: int) -> None:
    """Ranks, the buffer and a generator are lost at random steps, several at once."""
    rng = Random(seed)
    job = Job(tmp_path, stage=seed % 4, workers=3)
    kinds = rng.choices(["rank", "rank", "buffer", "fence", "generator"], k=5)
    events = sorted((rng.randint(1, STEPS - 1), kind) for kind in kinds)
    killed = 0

    def act(generation: int, step: int) -> None:
        nonlocal killed
        while events and events[0][0] <= step:
            match events.pop(0)[1]:
                case "rank" if killed < 2:
                    killed += 1
                    job.local.kill(killed)
                case "buffer":
                    job.buffer.replace()
                    job.fence(generation)
                case "fence":
                    job.fence(generation)
                case "generator":
                    job.buffer.server.lose([0])

    job.run(act)
    assert events == []

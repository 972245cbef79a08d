"""The controller with fake workers and virtual time: no Ray, no waiting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator import events as ev
from rayzero.orchestrator.controller import COMMAND_S, GRACE_S, POLL_S, STOP_S, Controller
from rayzero.orchestrator.errors import JobFailedError, JobStoppedError
from rayzero.orchestrator.notices import StateEntered, Warned, WorkersUp
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.result import JobResult
from rayzero.orchestrator.states import State
from rayzero.workers.messages import (
    Crashed,
    CrashKind,
    Finished,
    Heartbeat,
    Joined,
    LogLine,
    Report,
    Stopped,
)
from tests.orchestrator.support import FakeGroup, Notebook, VirtualClock, plan, settle


class Stage:
    """One controller and everything around it."""

    def __init__(self, folder: Path, group: FakeGroup | None = None, **changes: Any) -> None:
        self.clock = VirtualClock()
        self.group = group or FakeGroup()
        self.notebook = Notebook()
        self.plan = plan(folder, **changes)
        self.controller = Controller(self.plan, self.group, self.notebook, self.clock)
        self.run = asyncio.ensure_future(self.controller.run())

    async def train(self) -> None:
        """Goes on until every rank is in the user's function."""
        await settle()
        self.group.say_all(lambda rank: Joined(1, rank))
        await settle()

    def crash(self, rank: int, kind: CrashKind, error: str = "ValueError: hole") -> None:
        self.group.say(rank, Crashed(1, rank, kind, 3, error, "the user's frames"))

    async def result(self) -> JobResult:
        assert self.run.done(), "the controller waits for time or for a worker"
        left = [str(task.get_coro()) for task in asyncio.all_tasks() - {asyncio.current_task()}]
        assert left == []
        assert self.group.releases >= 1
        return await self.run

    @property
    def states(self) -> list[State]:
        return [notice.state for notice in self.notebook.of(StateEntered)]


Play = Callable[[Path], Awaitable[None]]


def played(scene: Play) -> Callable[[Path], None]:
    """Runs an async test in a loop of its own."""

    async def bounded(folder: Path) -> None:
        async with asyncio.timeout(20):
            await scene(folder)

    def test(tmp_path: Path) -> None:
        asyncio.run(bounded(tmp_path))

    test.__name__ = scene.__name__
    return test


def done(rank: int, **result: Any) -> Finished:
    return Finished(1, rank, result or None, {"tokens": 5}, 1000 + rank)


@played
async def test_a_job_runs_to_its_summary(folder: Path):
    stage = Stage(folder)
    await stage.train()
    assert stage.states == [State.STARTING, State.RUNNING]
    for rank in (0, 1):
        gauges = {"loss": 2.0 + rank, "step_s": 0.5, "bytes/slots": 64.0}
        stage.group.say(
            rank, LogLine(rank, "stdout", "hello"), Report(1, rank, 1, {"tokens": 50}, gauges)
        )
    await settle()
    stage.group.say_all(lambda rank: done(rank, score=rank))
    await stage.clock.turn(0)
    result = await stage.result()
    assert stage.states[-1] is State.SUCCEEDED
    assert result.metrics == {
        "job": "job",
        "steps": 1,
        "world_size": 2,
        "stage": None,
        "loss": {"first": 2.5, "last": 2.5},
        "tokens_per_s": 200.0,
        "seconds": 0.0,
        "peak_bytes": {"process": 1001, "slots": 64},
        "score": 0,
    }
    assert json.loads(result.summary_path.read_text()) == result.metrics
    (record,) = stage.notebook.of(StepRecord)
    assert (record.step, record.tokens_per_s) == (1, 200.0)
    assert [line.rank for line in stage.notebook.of(LogLine)] == [0, 1]
    assert stage.notebook.of(WorkersUp) == [WorkersUp(stage.group.infos)]


@played
async def test_every_worker_gets_its_place_and_the_same_store(folder: Path):
    group = FakeGroup(3, node_of=lambda index: "ab"[index % 2])
    stage = Stage(folder, group)
    await settle()
    seen = [group.assigned[worker] for worker in (0, 2, 1)]  # node by node
    assert [(a.rank, a.local_rank, a.local_world_size) for a in seen] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 0, 1),
    ]
    assert {(a.generation, a.world_size, a.store_host, a.store_port) for a in seen} == {
        (1, 3, "10.0.0.0", 4000)
    }
    stage.controller.feed(ev.StopWanted())
    await settle()


@played
async def test_running_means_that_every_rank_has_joined(folder: Path):
    stage = Stage(folder)
    await settle()
    stage.group.say(0, Joined(1, 0))
    await settle()
    assert stage.states == [State.STARTING]
    stage.group.say(1, Joined(1, 1))
    await settle()
    assert stage.states == [State.STARTING, State.RUNNING]
    stage.controller.feed(ev.StopWanted())
    await stage.clock.turn(STOP_S)


@played
async def test_a_lost_worker_ends_the_job_and_is_named(folder: Path):
    stage = Stage(folder)
    await stage.train()
    stage.group.say(0, Heartbeat(0, 8, "forward", 0.0))
    await settle()
    stage.group.kill(1, "the process was killed")
    await settle()
    with pytest.raises(JobFailedError) as caught:
        await stage.result()
    assert "rank 1 on node host-a (pid 101) was lost in step 8: the process was killed" in str(
        caught.value
    )
    assert stage.states[-1] is State.FAILED
    assert not (stage.plan.output_dir / "summary.json").exists()


@played
async def test_a_dead_peer_explains_a_failed_collective_that_was_known_first(folder: Path):
    stage = Stage(folder)
    await stage.train()
    stage.crash(0, "collective", "Connection closed by peer")
    await stage.clock.turn(GRACE_S / 2)
    assert not stage.run.done()
    stage.group.kill(1, "killed")
    await settle()
    with pytest.raises(JobFailedError, match=r"rank 1 on node host-a .* was lost"):
        await stage.result()


@played
async def test_a_failed_collective_nobody_explains_ends_the_job_after_a_grace(folder: Path):
    stage = Stage(folder)
    await stage.train()
    stage.crash(0, "collective", "timed out")
    await stage.clock.turn(GRACE_S)
    with pytest.raises(JobFailedError, match="a collective failed on rank 0"):
        await stage.result()


@played
async def test_user_code_that_raises_ends_the_job_with_its_frames(folder: Path):
    stage = Stage(folder)
    await stage.train()
    stage.crash(1, "user")
    await settle()
    with pytest.raises(JobFailedError, match="in step 3 on rank 1") as caught:
        await stage.result()
    assert caught.value.traceback == "the user's frames"


@played
async def test_a_config_error_of_a_worker_stays_one(folder: Path):
    stage = Stage(folder)
    await settle()
    stage.crash(0, "config", "the batch sizes disagree")
    await settle()
    with pytest.raises(ConfigError, match="disagree"):
        await stage.result()


@played
async def test_too_few_resources_end_the_job_before_it_starts(folder: Path):
    group = FakeGroup()
    group.refusal = JobFailedError("no room")
    stage = Stage(folder, group)
    await settle()
    with pytest.raises(JobFailedError, match="no room"):
        await stage.result()
    assert stage.states == [State.STARTING, State.FAILED]


@played
async def test_a_stop_unwinds_every_worker(folder: Path):
    stage = Stage(folder)
    await stage.train()
    stage.controller.feed(ev.StopWanted())
    stage.controller.feed(ev.StopWanted())
    await settle()
    assert stage.group.stopped == [0, 1]
    stage.group.say(0, Stopped(1, 0))
    await settle()
    assert not stage.run.done()
    stage.group.say(1, Stopped(1, 1))
    await settle()
    with pytest.raises(JobStoppedError, match="after step 0"):
        await stage.result()
    assert stage.states[-2:] == [State.STOPPING, State.STOPPED]


@played
async def test_workers_that_do_not_unwind_are_killed_after_a_while(folder: Path):
    stage = Stage(folder)
    await stage.train()
    stage.group.deaf = {1}
    stage.controller.feed(ev.StopWanted())
    await stage.clock.turn(STOP_S - 0.1)
    assert not stage.run.done()
    await stage.clock.turn(0.1)
    with pytest.raises(JobStoppedError):
        await stage.result()


@played
async def test_a_stop_while_waiting_for_resources_is_at_once(folder: Path):
    group = FakeGroup()
    group.may_place.clear()
    stage = Stage(folder, group)
    await settle()
    stage.controller.feed(ev.StopWanted())
    await settle()
    with pytest.raises(JobStoppedError):
        await stage.result()


@played
async def test_a_rank_that_finished_before_the_stop_does_not_hold_it_up(folder: Path):
    stage = Stage(folder)
    await stage.train()
    stage.group.say(0, done(0))
    await settle()
    stage.controller.feed(ev.StopWanted())
    await settle()
    stage.group.say(1, Stopped(1, 1))
    await settle()
    with pytest.raises(JobStoppedError):
        await stage.result()


@played
async def test_a_worker_that_no_longer_answers_counts_as_lost(folder: Path):
    stage = Stage(folder)
    await stage.train()
    await stage.clock.turn(POLL_S + 60)
    with pytest.raises(JobFailedError, match="did not answer for 62 s"):
        await stage.result()


@played
async def test_a_worker_that_does_not_take_its_place_counts_as_lost(folder: Path):
    group = FakeGroup()
    group.deaf = {1}
    stage = Stage(folder, group)
    await stage.clock.turn(COMMAND_S)
    with pytest.raises(JobFailedError, match=r"rank 1 .* did not answer for 30 s"):
        await stage.result()


@played
async def test_keys_that_do_nothing_yet_are_told_at_the_start(folder: Path):
    stage = Stage(folder, metrics={"port": 9400})
    await settle()
    (warning,) = stage.notebook.of(Warned)
    assert warning.text.startswith("metrics.port: 9400 is not in this version")
    stage.controller.feed(ev.StopWanted())
    await settle()


@played
async def test_an_earlier_summary_does_not_outlive_a_failed_run(folder: Path):
    (folder / "job").mkdir()
    (folder / "job" / "summary.json").write_text("{}")
    stage = Stage(folder)
    await stage.train()
    stage.crash(0, "user")
    await settle()
    with pytest.raises(JobFailedError):
        await stage.result()
    assert not (folder / "job" / "summary.json").exists()


@played
async def test_news_of_another_generation_is_ignored(folder: Path):
    stage = Stage(folder)
    await stage.train()
    stage.group.say(0, Crashed(0, 0, "user", 1, "old", ""), Finished(0, 0, None, {}, 1))
    stage.group.say(1, Finished(0, 1, None, {}, 1))
    await settle()
    assert not stage.run.done()
    stage.controller.feed(ev.StopWanted())
    await stage.clock.turn(STOP_S)


@played
async def test_a_mistake_of_ours_in_a_background_task_is_not_silent(folder: Path):
    group = FakeGroup()

    async def broken(worker: int) -> int:
        raise KeyError(worker)

    group.open_store = broken  # type: ignore[method-assign]
    stage = Stage(folder, group)
    await settle()
    with pytest.raises(JobFailedError, match="rayzero itself failed: KeyError"):
        await stage.result()

"""What a restarted process of a job takes over: which workers, and from a store that is away. The
actors are fakes, folder and lease are real."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.orchestrator.cluster.leftovers import Inherited
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.job import lease, takeover
from rayzero.orchestrator.job.claims import ClaimStore, new_claim
from rayzero.orchestrator.job.lease import AwaitedLease, acquire_lease
from rayzero.orchestrator.job.takeover import Takeover, take_over
from rayzero.workers.lifetimes import Owned, index_of, name_in_run, role_of
from rayzero.workers.messages import Assignment, Joined, WorkerInfo
from rayzero.workers.worker_status import FunctionBegin, WorkerStatus
from tests.orchestrator.support import begun, plan, write_journal

LIMIT_S = 60.0
LATE_S = 0.3


class Worker:
    """A worker's actor and its `Owned` at once. Generation 0: its function was not called.

    Args:
        fate: "lives"; "starts": it does not answer yet; "unknown" to Ray at first; "slow"; "dead";
            "dies" after it has told its status.
    """

    group = ""
    run = "1"

    def __init__(self, index: int, generation: int, members: str, fate: str = "lives") -> None:
        self.what = str(index) if members != "role" else f"rollout:{index}"
        self.ended = False
        self._fate = fate
        self._asked = 0
        self._members = tuple(map(info, map(int, members))) if members != "role" else ()
        self._status = WorkerStatus(info(index), "", role=role_of(self.what))
        if generation:
            rank = members.index(str(index))
            size = len(members)
            self._status = WorkerStatus(
                info(index),
                "",
                Assignment(rank, 0, 1, "@vault", generation, size, "", 0),
                FunctionBegin(rank, size, generation),
                (Joined(generation, rank),),
                step=7,
            )
        self.status = self._method(self._tell_status)
        self.members = self._method(self._tell_members)
        self.describe = self._method(self._tell_status)

    def actor(self) -> Worker:
        return self

    def end(self) -> None:
        self.ended = True

    def _method(self, tell: Callable[[], Awaitable[Any]]) -> Any:
        return type("Method", (), {"remote": staticmethod(tell)})

    async def _tell_status(self) -> WorkerStatus:
        self._asked += 1
        if self.ended or self._fate == "dead":
            raise ActorDiedError
        if self._fate == "starts":
            await asyncio.sleep(10 * LIMIT_S)
        if self._fate == "slow":
            await asyncio.sleep(LATE_S)
        if self._fate == "unknown" and self._asked == 1:
            raise ActorUnavailableError("not known yet", None)
        return self._status

    async def _tell_members(self) -> tuple[WorkerInfo, ...]:
        if self._fate == "dies":
            raise ActorDiedError
        return self._members


def info(index: int) -> WorkerInfo:
    return WorkerInfo(index, "node", "node", "10.0.0.1", index)


def inherited(*workers: Worker) -> Inherited:
    return Inherited((), cast(Any, workers), ())


@pytest.mark.parametrize(
    ("workers", "present", "lost", "ended"),
    [
        ([(0, 1, "01"), (1, 1, "01")], [0, 1], [], []),
        ([(0, 1, "01"), (1, 1, "01", "unknown"), (2, 0, "", "starts")], [0, 1], [], [2]),
        ([(0, 1, "01", "dies"), (1, 1, "01"), (2, 0, "", "starts")], [1], [0], [0, 2]),
        ([(0, 1, "01", "dead"), (1, 1, "01")], [1], [0], [0]),
        ([(0, 1, "01"), (1, 1, "01"), (2, 0, "")], [0, 1], [], []),
        (
            [(0, 1, "01"), (1, 1, "01"), (2, 0, "role", "slow"), (3, 0, "", "starts")],
            [0, 1],
            [],
            [3],
        ),
        ([(0, 0, "role"), (1, 0, "role", "dead")], None, [], []),
        ([(0, 2, "02", "slow"), (1, 1, "01"), (2, 2, "02", "slow")], [0, 2], [], []),
        ([(0, 0, ""), (1, 0, "", "dead")], None, [], []),
        ([(0, 1, "01", "dies"), (1, 1, "01", "dead")], None, [], []),
    ],
)
async def test_members_that_live_are_continued_without_waiting_for_those_that_start(
    workers: list[tuple[Any, ...]], present: list[int] | None, lost: list[int], ended: list[int]
):
    those = [Worker(*each) for each in workers]
    began_s = asyncio.get_running_loop().time()
    living = await inherited(*those).find_living("1", LIMIT_S, LIMIT_S)
    assert asyncio.get_running_loop().time() - began_s < LIMIT_S / 2
    assert [index_of(worker.what) for worker in those if worker.ended] == ended
    if present is None:
        assert living is None
        return
    assert living is not None
    assert [it.info.index for it in living.found.present] == present
    assert [it.index for it in living.found.lost] == lost


@pytest.mark.parametrize(("role", "own"), [("", ([0, 1], ["a"])), ("rollout", ([2], ["b"]))])
async def test_each_group_has_its_own_workers_and_reservations(
    role: str, own: tuple[list[int], list[str]]
):
    workers = Worker(0, 1, "01"), Worker(1, 1, "01"), Worker(2, 0, "role")
    groups = Owned("job", "1", "5e", "a"), Owned("job", "1", name_in_run("rollout", "77"), "b")
    living = await Inherited((), cast(Any, workers), groups).find_living("1", LIMIT_S, LIMIT_S)
    assert living is not None
    group: Any = Mock(role=role)
    living.hand_over(group)
    (found, reservations) = group.adopt.call_args.args
    assert ([status.info.index for status, _ in found], reservations) == own


async def test_orders_of_a_cut_off_process_are_seen_once_agents_obey_its_successor():
    """Between its first answer and that, a spare was begun, the ranks were renewed, one ended."""
    workers = [Worker(0, 1, "01"), Worker(1, 1, "01"), Worker(2, 0, "role"), Worker(3, 0, "")]
    living = await inherited(*workers).find_living("1", LIMIT_S, LIMIT_S)
    assert living is not None
    for worker, ordered in zip(workers, (Worker(0, 2, "01"), Worker(1, 2, "01")), strict=False):
        worker._status = ordered._status
    workers[2]._status = replace(workers[2]._status, number=0)
    workers[3].ended = True
    again = await living.ask_again(LIMIT_S)
    assert (living.found.generation.generation, again.found.generation.generation) == (1, 2)
    assert [status.number for status in again.found.roles] == [0]
    assert [status.info.index for status in again.found.others] == [3], "its agent reports its end"
    for worker in workers:
        worker.ended = True
    assert (await again.ask_again(LIMIT_S)).found == again.found


class Restarted:
    """A process of a job that Ray has started again, in the job's real folder.

    Args:
        failures: of the store, in each of its uses.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, failures: int = 0) -> None:
        self.plan = plan(folder)
        self.run = self.plan.worker_spec.run
        self.warnings: list[str] = []
        self.is_stopped = False
        self.has_held = False
        self.folder = folder / "job"
        self._leases: list[AwaitedLease] = []
        for owner, name in ((takeover, "load_past_runs"), (ClaimStore, "list_others")):
            monkeypatch.setattr(owner, name, self._failing(getattr(owner, name), failures))
        monkeypatch.setattr(lease, "CLAIM_POLL_S", 0.01)
        self._patch = monkeypatch

    async def take(self, *workers: Worker) -> Takeover:
        async def find(job: str) -> Inherited:
            return inherited(*workers)

        self._patch.setattr(takeover, "find_inherited", find)
        for worker in workers:
            worker.run = self.run
        try:
            return await take_over(
                self.plan, self._begin_lease, self.warnings.append, lambda: self.is_stopped
            )
        finally:
            for held in self._leases:
                with suppress(StoreError):
                    await asyncio.to_thread(held.wait)
                    self.has_held = True
                held.release()

    def _begin_lease(self, trains: bool) -> AwaitedLease:
        acquire = partial(
            acquire_lease,
            self.plan.job_folder,
            new_claim("job", LIMIT_S),
            print,
            trains=trains,
            run=self.run,
        )
        self._leases.append(AwaitedLease(acquire, print))
        return self._leases[0]

    def _failing(self, call: Callable[..., Any], failures: int) -> Callable[..., Any]:
        left = [failures]

        def fail_first(*args: Any) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                raise StoreError("slow", "s3://runs", "no answer")
            return call(*args)

        return fail_first


async def test_job_that_trains_outlasts_a_store_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job = Restarted(tmp_path, monkeypatch, failures=3)
    write_journal(job.folder, begun(job.plan, job.run))
    workers = Worker(0, 1, "01"), Worker(1, 1, "01")
    taken = await job.take(*workers)
    assert taken.living is not None
    assert taken.past.lost is not None
    assert taken.epoch >= 1
    assert job.has_held
    assert not any(worker.ended for worker in workers)
    assert all("workers train on: s3://runs: no answer" in text for text in job.warnings)
    assert 1 <= len(job.warnings) <= 2, "once for the journal, once for the claims"


async def test_first_answer_may_take_longer_than_the_others():
    """As on a busy machine whose head has just returned."""
    slow, stopped = Worker(0, 1, "01", "slow"), Worker(1, 1, "01", "starts")
    living = await inherited(slow, stopped).find_living("1", LATE_S / 3, LIMIT_S)
    assert living is not None
    assert [it.index for it in living.found.lost] == [1]
    assert not slow.ended
    assert stopped.ended


async def test_stop_ends_the_wait_for_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = Restarted(tmp_path, monkeypatch, failures=20)
    job.is_stopped = True
    with pytest.raises(JobStoppedError, match="no answer"):
        await job.take(Worker(0, 1, "0"))


@pytest.mark.parametrize("trained", [True, False])
async def test_workers_without_a_journal_or_a_function_are_ended_under_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: bool
):
    job = Restarted(tmp_path, monkeypatch)
    if not trained:
        write_journal(job.folder, begun(job.plan, job.run))
    worker = Worker(0, 1, "0") if trained else Worker(0, 0, "")
    taken = await job.take(worker)
    assert taken.living is None
    assert worker.ended
    assert (taken.past.lost is None) == trained
    assert (taken.epoch, taken.first_index) == (1, 1)


async def test_job_that_does_not_train_fails_with_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job = Restarted(tmp_path, monkeypatch, failures=1)
    with pytest.raises(StoreError, match="s3://runs: no answer"):
        await job.take()

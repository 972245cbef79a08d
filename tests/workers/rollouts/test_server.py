"""The buffer's server and its clients over sockets: a trainer's loader, generators, a reward."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from threading import Event, Thread
from time import monotonic
from typing import Any

import pytest
import torch

from rayzero.engine.data.consumed import Consumed
from rayzero.engine.data.consumption import LogSource
from rayzero.engine.data.loader import StepLoader
from rayzero.engine.data.micro_batches import MicroBatches
from rayzero.engine.data.sampling import SampleOrder, StepSplit, TrainingProgress, assign_step
from rayzero.engine.errors import DataError, EngineError
from rayzero.workers.rollouts.address import BufferAddress
from rayzero.workers.rollouts.buffer_client import RolloutClient, RolloutLog, encode
from rayzero.workers.rollouts.ledger import RolloutPlan
from rayzero.workers.rollouts.server import RolloutServer
from rayzero.workers.rollouts.tasks import Task, Tasks

HOST, LIMIT_S, SEED = "127.0.0.1", 60.0, 7
PROMPTS = [f"prompt {number}" for number in range(10)]


def go_on() -> None:
    """Nothing is to end."""


class Stopped(Exception):  # noqa: N818 -- as SystemExit
    """The worker is to end."""


@dataclass
class Sample:
    prompt: str
    member: int
    ids: torch.Tensor
    reward: float = 0.0


class Buffer:
    """The present buffer, and the trainer's generation."""

    def __init__(self, plan: RolloutPlan) -> None:
        self.plan = plan
        self.generation = self.secrets = 0
        self.published = 0
        self.now_s = 0.0
        self.start()

    def start(self) -> None:
        secret = b"%032d" % self.secrets
        self.secrets += 1
        self.server = RolloutServer(self.plan, HOST, LIMIT_S, lambda: self.now_s)
        self.server.admit(secret)
        self.address: BufferAddress | None = BufferAddress(HOST, self.server.port, secret)
        self.publish(self.published)

    def publish(self, version: int) -> None:
        self.published = version
        self.server.publish(self.generation, version)

    def replace(self) -> None:
        """Another buffer, at another address, and the trainer's next generation."""
        self.server.close()
        self.generation += 1
        self.start()

    def log(self, prompts: Any = PROMPTS) -> RolloutLog:
        address = self.address
        return RolloutLog(
            prompts, SEED, self.plan.group, lambda: (self.generation, address), LIMIT_S
        )

    def tasks(
        self,
        worker: int = 0,
        stage: int = 0,
        prompts: int = 1,
        check: Callable[[], None] = go_on,
        timeout_s: float = LIMIT_S,
    ) -> Tasks:
        return Tasks(
            lambda: self.address, worker, stage, self.plan.group, timeout_s, check, prompts
        )


@contextmanager
def buffer_of(batch: int = 2, group: int = 2, **options: Any) -> Iterator[Buffer]:
    buffer = Buffer(RolloutPlan(batch, group, **options))
    try:
        yield buffer
    finally:
        buffer.server.close()


@contextmanager
def running(*bodies: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Threads of workers, which end by their check."""
    stop, errors = Event(), list[BaseException]()

    def check() -> None:
        if stop.is_set():
            raise Stopped

    def run(body: Callable[[Callable[[], None]], None]) -> None:
        try:
            body(check)
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads)
    assert errors == []


def sample(prompt: str, group: int) -> list[Sample]:
    ids = torch.arange(group * 4).view(group, 4)
    return [Sample(prompt, member, ids[member]) for member in range(group)]


def generate(buffer: Buffer, worker: int) -> Callable[[Callable[[], None]], None]:
    def body(check: Callable[[], None]) -> None:
        for task in buffer.tasks(worker, prompts=2, check=check):
            task.done([sample(it, buffer.plan.group) for it in task.prompts])

    return body


def score(buffer: Buffer, worker: int) -> Callable[[Callable[[], None]], None]:
    def body(check: Callable[[], None]) -> None:
        for task in buffer.tasks(worker, stage=1, check=check):
            for it in task.samples:
                assert it.prompt == task.prompts[0]
                it.reward = len(it.prompt) + it.member
            task.done(task.samples)

    return body


class Trainer:
    """The ranks of a trainer, one after the other in one thread, each with its own clients."""

    def __init__(self, buffer: Buffer, ranks: int) -> None:
        self.buffer = buffer
        self.trained: list[list[Sample]] = []
        self.saved: Any = None
        self.join(ranks)

    def join(self, ranks: int) -> None:
        """Another generation of ranks, from the state that was saved."""
        batch = self.buffer.plan.prompts_per_batch * self.buffer.plan.group
        self.ranks = []
        for rank in range(ranks):
            cursor = len(self.trained) * batch
            progress = TrainingProgress(len(self.trained), sample_cursor=cursor, global_batch=batch)
            split = StepSplit(assign_step(batch, ranks, rank, 3))
            own = MicroBatches(progress, split)
            source = LogSource(self.buffer.log(), progress, self.register)
            self.ranks.append((own, StepLoader(source, own, list)))
        self.batches = [loader.steps(99) for _, loader in self.ranks]

    def register(self, name: str, get: Callable[[], Any], set: Callable[[Any], object]) -> None:  # noqa: A002
        self.get = get
        if self.saved is not None:
            set(self.saved)

    def step(self) -> None:
        samples = []
        for (own, loader), batches in zip(self.ranks, self.batches, strict=True):
            for turn in range(loader.micro_steps):
                batch = next(batches)
                own.on_forward(batch)
                samples += batch if own.begin_backward(step_due=False) else []
                own.begin_step(ends_step=turn == loader.micro_steps - 1)
                if turn == loader.micro_steps - 1:
                    own.progress.step += 1
                    own.progress.sample_cursor += own.progress.global_batch
                own.end_step()
        self.trained.append(samples)
        self.saved = self.get()

    def close(self) -> None:
        for batches in self.batches:
            batches.close()


def check_trained(trainer: Trainer, steps: int) -> None:
    """Each prompt once that the state tells of, in groups of its samples in their order."""
    group, saved = trainer.buffer.plan.group, trainer.saved
    assert len(trainer.trained) == steps
    for step in trainer.trained:
        expected = [(first.prompt, member) for first in step[::group] for member in range(group)]
        assert [(it.prompt, it.member) for it in step] == expected
    numbers = [*range(saved["frontier"]), *saved["extras"]]
    indices = SampleOrder(len(PROMPTS), SEED).indices(0, max(numbers) + 1).tolist()
    trained = [it.prompt for step in trainer.trained for it in step[::group]]
    assert sorted(trained) == sorted(PROMPTS[indices[number]] for number in numbers)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("lag", [0, 2])
def test_trainer_generators_and_reward(ranks: int, lag: int) -> None:
    with (
        buffer_of(batch=2, group=2, max_version_lag=lag, lease_s=(LIMIT_S,) * 2) as buffer,
        running(generate(buffer, 0), generate(buffer, 1), score(buffer, 2)),
    ):
        trainer = Trainer(buffer, ranks)
        for step in range(1, 11):
            trainer.step()
            buffer.publish(step)
        trainer.close()
    samples = [it for step in trainer.trained for it in step]
    assert len(samples) == 40
    assert all(it.reward == len(it.prompt) + it.member for it in samples)
    assert all(it.ids.tolist() == [4 * it.member + place for place in range(4)] for it in samples)
    check_trained(trainer, 10)
    assert lag or trainer.saved == {"frontier": 20, "extras": []}


@pytest.mark.parametrize("goes_back", [0, 1])
def test_lost_buffer_trains_nothing_twice(goes_back: int) -> None:
    """The trainer's ranks are fenced with it, and read on from their state; generators stay."""
    with (
        buffer_of(batch=2, group=3, max_version_lag=1) as buffer,
        running(generate(buffer, 0), generate(buffer, 1)),
    ):
        trainer = Trainer(buffer, 2)
        for ranks in (3, 1, 2, 2):
            states = [trainer.saved]
            for _ in range(3):
                trainer.step()
                states.append(trainer.saved)
                buffer.publish(len(trainer.trained) - goes_back)
            trainer.close()
            trainer.saved = states[3 - goes_back]
            del trainer.trained[len(trainer.trained) - goes_back :]
            buffer.replace()
            trainer.join(ranks)
        trainer.close()
    check_trained(trainer, 4 * (3 - goes_back))


def test_waits_end_when_they_are_to() -> None:
    with buffer_of(lease_s=(LIMIT_S, LIMIT_S)) as buffer:
        log = issued(buffer)
        stops, ended = Event(), list[float]()

        def check() -> None:
            if stops.is_set():
                raise Stopped

        rewards = buffer.tasks(stage=1, check=check)

        def wait(call: Callable[[], Any]) -> None:
            with pytest.raises(Stopped):
                call()
            ended.append(monotonic())

        calls = (lambda: next(rewards), lambda: log.read(0, 2, check))
        threads = [Thread(target=wait, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        task = next(buffer.tasks())
        stopped_s = monotonic()
        stops.set()
        for thread in threads:
            thread.join(LIMIT_S)
        assert len(ended) == 2
        assert max(ended) - stopped_s < 5, "less than the buffer waits"
        stops.clear()
        assert task.done([["a", "b"]])
        assert next(rewards).done(["A", "B"]), "they connect again"
        assert log.read(0, 2, check) == [(0, "A"), (1, "B")]


def issued(buffer: Buffer) -> RolloutLog:
    """The log of a rank whose prompts the buffer has."""
    log = buffer.log()
    log.open(Consumed(), go_on)
    issue_more(buffer, log)
    return log


def issue_more(buffer: Buffer, log: RolloutLog) -> None:
    """Reads what is not there until the buffer has got more prompts, and is interrupted then."""
    stop, before = Event(), buffer.server.counts().waiting

    def check() -> None:
        if stop.is_set():
            raise Stopped

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(log.read, 0, 1, check)
        until_s = monotonic() + LIMIT_S
        while buffer.server.counts().waiting == before and monotonic() < until_s:
            pass
        stop.set()
        with pytest.raises(Stopped):
            reading.result(LIMIT_S)
    assert buffer.server.counts().waiting > before


def test_seconds_that_workers_wait_are_counted_by_stage() -> None:
    ticks = count()
    plan = RolloutPlan(1, 1, lease_s=(9.0, 9.0))
    server = RolloutServer(plan, HOST, LIMIT_S, lambda: float(next(ticks)))
    try:
        secret = b"%032d" % 0
        server.admit(secret)
        address = BufferAddress(HOST, server.port, secret)
        client = RolloutClient(lambda: address, LIMIT_S)
        client.call("take", 1, 7, 1, [], 0.0, check=go_on)
        client.close()
        first, second = server.counts().wait_s
        assert first == 0
        assert second >= 1
    finally:
        server.close()


def test_prompts_are_not_asked_of_a_rank_that_is_gone() -> None:
    with buffer_of(max_version_lag=0) as buffer:
        issued(buffer)  # its interrupted request still waits at the buffer
        log = buffer.log()
        log.open(Consumed(), go_on)
        buffer.publish(1)
        issue_more(buffer, log)


def test_prompts_are_asked_of_one_rank_at_a_time() -> None:
    with buffer_of(max_version_lag=0) as buffer:
        client = RolloutClient(lambda: buffer.address, LIMIT_S)

        def wanted() -> list[int]:
            values, _ = client.call("read", 0, 1, 0.0, check=go_on)
            return list(values["wanted"])

        assert wanted() == [0, 1, 2, 3]
        assert wanted() == []
        client.call("open", 1, 0, [], check=go_on)  # by the next generation's rank
        assert wanted() == [0, 1, 2, 3]
        client.call("issue", [0, 1], contents=[b"a", b"b"], check=go_on)
        assert wanted() == []
        buffer.now_s = 100.0  # it is slow, or gone
        assert wanted() == [2, 3]


def test_leases_of_an_earlier_buffer_do_not_count() -> None:
    with buffer_of(batch=1, max_version_lag=0) as buffer:
        issued(buffer)
        tasks = buffer.tasks()
        earlier, server = next(tasks), buffer.server
        buffer.start()
        issued(buffer)
        other = next(buffer.tasks(1))
        assert earlier.prompts == other.prompts
        assert not earlier.done([["x", "x"]])
        assert other.done([["a", "b"]])
        server.close()


def test_expired_and_lost_tasks_go_to_others() -> None:
    with buffer_of(lease_s=(10.0,), max_version_lag=0) as buffer:
        issued(buffer)
        hung, lost = next(buffer.tasks(0)), next(buffer.tasks(1))
        buffer.server.lose([1])
        third, fourth = buffer.tasks(2), buffer.tasks(3)
        again = next(third)
        assert again.prompts == lost.prompts
        assert not lost.done([["x", "x"]])
        assert again.done([["x", "x"]])
        buffer.now_s = 10.0
        last = next(fourth)
        assert last.prompts == hung.prompts
        assert not hung.done([["late", "late"]])
        assert last.done([["y", "y"]])


def test_extended_tasks_stay() -> None:
    with buffer_of(batch=2, lease_s=(10.0,), max_version_lag=0) as buffer:
        issued(buffer)
        first, second = next(buffer.tasks(0)), next(buffer.tasks(1))
        buffer.now_s = 9.0
        first.extend()
        buffer.now_s = 18.0
        assert next(buffer.tasks(2)).prompts == second.prompts
        assert buffer.server.counts().leased == (2,)
        assert first.done([["a", "b"]])


def test_tasks_of_a_lost_reply_are_taken_again() -> None:
    with buffer_of(lease_s=(LIMIT_S,), max_version_lag=0) as buffer:
        log = issued(buffer)
        client = RolloutClient(lambda: buffer.address, LIMIT_S)
        values, _ = client.call("take", 0, 0, 2, [], 0.0, check=go_on)
        assert len(values["leases"]) == 2  # of which the worker never hears
        tasks = buffer.tasks(0)
        first, second = next(tasks), next(tasks)
        assert first.prompts != second.prompts
        del second  # dropped by the function
        assert first.done([["a", "b"]])
        assert next(tasks).done([["c", "d"]])
        assert [it for _, it in log.read(0, 4, go_on)] == ["a", "b", "c", "d"]


def test_a_request_whose_connection_was_lost_takes_nothing() -> None:
    """It waits at the buffer: for tasks that its worker, or one in its place, gets."""
    with buffer_of(lease_s=(LIMIT_S,), max_version_lag=0) as buffer:

        def interrupted(worker: int) -> Tasks:
            checks = iter(range(2))

            def check() -> None:
                if next(checks, None) is None:
                    raise Stopped

            tasks = buffer.tasks(worker, check=check)
            with pytest.raises(Stopped):
                next(tasks)
            tasks._check = go_on
            return tasks

        again, _ = interrupted(0), interrupted(1)
        buffer.server.lose([1])
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(next, again)
            issued(buffer)
            assert first.result(LIMIT_S).done([["a", "b"]])
        assert buffer.server.counts().leased == (0,)
        assert next(buffer.tasks(2)).done([["a", "b"]])


def test_generators_wait_for_a_buffer_that_is_being_started() -> None:
    with buffer_of(max_version_lag=0) as buffer:
        issued(buffer)
        present, buffer.address = buffer.address, None
        calls = iter(range(3))

        def check() -> None:
            if next(calls, None) is None:
                buffer.address = present

        # However long that takes: the controller opens it.
        assert next(buffer.tasks(check=check, timeout_s=0.01)).prompts


@pytest.mark.parametrize("kind", ["closed", "stranger"])
def test_buffer_that_does_not_answer_is_an_error(kind: str) -> None:
    with buffer_of() as buffer:
        present = buffer.address
        assert present is not None
        if kind == "closed":
            buffer.server.close()
        buffer.address = {
            "closed": present,
            "stranger": BufferAddress(HOST, present.port, b"another secret"),
        }[kind]
        with pytest.raises(DataError, match=r"has not answered 'take' for 0.3 s") as caught:
            next(buffer.tasks(timeout_s=0.3))
        assert "another secret" not in str(caught.value)


@pytest.mark.parametrize(
    "results",
    [
        [],
        [["a", "b"]],
        [["a", "b"], ["c"]],
        [["a", "b"], "cd"],
        ["a", "b"],
        [["a", "b"], ["c", "d"], ["e", "f"]],
    ],
)
def test_results_have_the_size_of_the_group(results: list[Any]) -> None:
    with buffer_of(max_version_lag=0) as buffer:
        issued(buffer)
        task = next(buffer.tasks(prompts=2))
        with pytest.raises(
            EngineError, match=r"a list of 2 samples for each of the 2 task.prompts"
        ):
            task.done(results)
        assert task.done([["a", "b"], ("c", "d")])
        with pytest.raises(EngineError, match="called twice"):
            task.done([["a", "b"], ("c", "d")])


def test_later_stages_return_what_samples_have_become() -> None:
    with buffer_of(batch=1, max_version_lag=0, lease_s=(LIMIT_S,) * 2) as buffer:
        log = issued(buffer)
        next(buffer.tasks()).done([["a", "b"]])
        task = next(buffer.tasks(stage=1))
        assert task.samples == ["a", "b"]
        with pytest.raises(EngineError, match=r"a result for each of the 2 task.samples"):
            task.done([["a", "b"]])
        assert task.done([1, 2])
        assert log.read(0, 2, go_on)[1][1] == 2


def test_wrong_requests_are_refused() -> None:
    with buffer_of() as buffer:
        client = RolloutClient(lambda: buffer.address, LIMIT_S)
        with pytest.raises(DataError, match="rollout request 'drop'"):
            client.call("drop", check=go_on)
        log = buffer.log()
        log.open(Consumed(4), go_on)
        with pytest.raises(DataError, match="rollouts from position 0"):
            log.read(0, 1, go_on)
        with pytest.raises(EngineError, match="tasks of 0 prompts"):
            buffer.tasks(prompts=0)


def test_tensors_are_sent_without_what_they_are_views_of() -> None:
    whole = torch.zeros(1_000_000, requires_grad=True)
    content = encode({"ids": whole[:10], "text": "t"})
    assert len(content) < 2000
    value = pickle.loads(content)
    assert value["ids"].shape == (10,)
    assert not value["ids"].requires_grad


def test_what_cannot_be_pickled_is_named() -> None:
    class Local:
        pass

    with pytest.raises(EngineError, match=r"a Local cannot be sent .*\n.*\n.*level of a module"):
        encode(Local())


def test_prompts_are_the_datasets_in_the_order_of_the_seed() -> None:
    with buffer_of(batch=3, max_version_lag=3) as buffer:
        issued(buffer)
        tasks: list[Task] = [next(buffer.tasks(worker)) for worker in range(12)]
        order = SampleOrder(len(PROMPTS), SEED).indices(0, 12).tolist()
        assert [it.prompts for it in tasks] == [[PROMPTS[index]] for index in order]

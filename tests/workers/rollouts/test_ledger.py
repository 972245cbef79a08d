"""The ledger of rollouts: random courses against a plain model, and the rules one by one."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rayzero.engine.data.consumed import Consumed
from rayzero.engine.errors import ConfigError, DataError
from rayzero.workers.rollouts.ledger import RolloutLedger, RolloutPlan, TaskLease

PICK = st.integers(0, 999)
LIMIT_S = 10.0
TOTAL_STEPS = 12


def make_samples(lease: TaskLease, group: int) -> list[bytes]:
    """What a worker makes of a task: unlike that of any other attempt."""
    return [b"%d.%d.%d" % (lease.number, lease.attempt, member) for member in range(group)]


class Course(RuleBasedStateMachine):
    """Generators, a trainer of one or two ranks, and faults. The trainer's own history, which its
    state would restore, is the truth that the ledger is compared with."""

    @initialize(
        batch=st.integers(1, 4),
        group=st.integers(1, 2),
        lag=st.integers(0, 3),
        stages=st.integers(1, 2),
        max_bytes=st.sampled_from([0, 40, 10**9]),
    )
    def begin(self, batch: int, group: int, lag: int, stages: int, max_bytes: int) -> None:
        self.plan = RolloutPlan(
            batch, group, lag, (LIMIT_S,) * stages, max_bytes, prompts=batch * TOTAL_STEPS
        )
        self.now_s = 0.0
        self.generation = self.published = 0
        self.trained: list[list[int]] = []  # numbers of the prompts of each step
        self.read_again: dict[int, list[tuple[int, tuple[bytes, ...]]]] = {}
        self.leases: list[TaskLease] = []  # of workers, which may be late
        self.live: dict[int, TaskLease] = {}
        self.begun: dict[int, int] = {}
        self.buffers = 0
        self.lives = [0, 0, 0]  # a worker that is lost has another number then
        self.make_buffer()

    def make_buffer(self) -> None:
        self.buffers += 1
        self.ledger = RolloutLedger(self.plan, first_attempt=self.buffers * 10**6)
        self.live = {}
        self.begun = {}
        self.ledger.publish(self.generation, self.published)
        self.ledger.open(self.generation, self.consumed())

    def consumed(self) -> Consumed:
        return Consumed().add(number for step in self.trained for number in step)

    # Generators

    @rule(start=PICK, stop=PICK)
    def issue(self, start: int, stop: int) -> None:
        wanted = self.ledger.wanted()
        for number in wanted[start % 5 : stop % 20]:
            self.ledger.issue(number, b"prompt %d" % number)

    @rule(worker=st.integers(0, 2), count=st.integers(1, 3), stage=st.integers(0, 1))
    def take(self, worker: int, count: int, stage: int) -> None:
        worker += 10 * self.lives[worker]
        if stage < len(self.plan.lease_s):
            held = [it.attempt for it in self.leases if it.worker == worker]
            own = [it for it in self.live.values() if (it.worker, it.stage) == (worker, stage)]
            dropped = [it for it in own if it.attempt not in held]
            self.end_leases(dropped)
            assert self.ledger.keep(stage, worker, held) is bool(dropped)
            self.add(self.ledger.take(stage, worker, count, self.now_s))

    @rule(
        workers=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        slow=st.integers(0, 3),
        publishes=st.booleans(),
    )
    def work(self, workers: list[int], slow: int, publishes: bool) -> None:
        """A while without faults, but for some tasks that take long."""
        for worker in workers:
            for number in self.ledger.wanted():
                self.ledger.issue(number, b"prompt %d" % number)
            for stage in range(len(self.plan.lease_s)):
                before = len(self.leases)
                self.take(worker, 5, stage)
                for lease in self.leases[before + slow :]:
                    self.leases.remove(lease)
                    self.finish(lease)
            slow = 0
            self.train()
            if publishes:
                self.published = len(self.trained)
                self.ledger.publish(self.generation, self.published)

    @precondition(lambda self: self.leases)
    @rule(pick=PICK)
    def drop(self, pick: int) -> None:
        """The worker does not know of the task: the reply was lost, or its function has left it."""
        self.leases.pop(pick % len(self.leases))

    def add(self, leases: list[TaskLease]) -> None:
        for lease in leases:
            assert lease.prompt == b"prompt %d" % lease.number
            assert lease.number not in self.live, "two workers have it"
            if lease.stage == 0:
                assert lease.number // self.plan.prompts_per_batch <= (
                    self.published + self.plan.max_version_lag
                )
                self.begun[lease.number] = self.published
            self.live[lease.number] = lease
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(pick=PICK)
    def done(self, pick: int) -> None:
        self.finish(self.leases.pop(pick % len(self.leases)))

    def finish(self, lease: TaskLease) -> None:
        samples = make_samples(lease, self.plan.group)
        counts = self.live.get(lease.number) == lease
        assert self.ledger.done(lease.number, lease.attempt, samples) is counts
        if counts:
            del self.live[lease.number]
            assert self.ledger.done(lease.number, lease.attempt, samples), "sent again"

    @rule(worker=st.integers(0, 2))
    def lose(self, worker: int) -> None:
        self.lives[worker] += 1
        worker += 10 * (self.lives[worker] - 1)
        self.ledger.lose([worker])
        assert self.ledger.take(0, worker, 1, self.now_s) == []
        self.end_leases([it for it in self.live.values() if it.worker == worker])

    def end_leases(self, leases: list[TaskLease]) -> None:
        for lease in leases:
            del self.live[lease.number]

    @rule(seconds=st.sampled_from([1.0, LIMIT_S]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        late = [it for it in self.live.values() if it.until_s <= self.now_s]
        assert self.ledger.expire(self.now_s) is bool(late)
        self.end_leases(late)

    # Trainer

    @rule()
    def train(self) -> None:
        step, batch = len(self.trained), self.plan.prompts_per_batch
        entries = self.ledger.read(step * batch, (step + 1) * batch)
        if entries is None or step == TOTAL_STEPS:
            return
        assert entries == self.read_again.get(step, entries), "another batch at the same place"
        for number, samples in entries:
            assert step - self.begun[number] <= self.plan.max_version_lag
            assert len(samples) == self.plan.group
            assert len({it.rpartition(b".")[0] for it in samples}) == 1, "of one attempt"
        self.read_again[step] = entries
        self.trained.append([number for number, _ in entries])
        assert self.ledger.consumed_at((step + 1) * batch) == self.consumed()

    @rule(pick=PICK)
    def publish(self, pick: int) -> None:
        self.published += pick % (len(self.trained) - self.published + 1)
        self.ledger.publish(self.generation, self.published)

    @rule(pick=PICK, is_far=st.booleans())
    def go_back(self, pick: int, is_far: bool) -> None:
        """After a repair, whose state is not older than the published one, or to a checkpoint."""
        oldest = max(0, self.published - 3) if is_far else self.published
        step = oldest + pick % (len(self.trained) - oldest + 1)
        old, self.generation = self.generation, self.generation + 1
        del self.trained[step:]
        late = self.consumed()
        self.ledger.open(self.generation, late)
        if step < self.published:
            self.published = step
            self.read_again = {it: v for it, v in self.read_again.items() if it < step}
            admitted = (step + self.plan.max_version_lag + 1) * self.plan.prompts_per_batch
            kept = {it: v for it, v in self.live.items() if it < admitted}
            self.live = {it: v for it, v in kept.items() if it not in late}
        with pytest.raises(DataError):
            self.ledger.open(old, late)
        self.ledger.publish(old, self.published + 5)  # changes nothing

    @rule()
    def lose_buffer(self) -> None:
        """Its node is gone, or its process: then the trainer joins another generation with it."""
        self.generation += 1
        self.read_again = {}
        self.make_buffer()

    @rule()
    def open_again(self) -> None:
        """Another rank, or another loop over the loader."""
        self.ledger.open(self.generation, self.consumed())

    @invariant()
    def each_prompt_once_in_exact_batches(self) -> None:
        numbers = [number for step in self.trained for number in step]
        assert len(set(numbers)) == len(numbers)
        assert all(len(step) == self.plan.prompts_per_batch for step in self.trained)
        counts = self.ledger.counts()
        assert sum(counts.leased) == len(self.live)
        assert (counts.lag_max or 0) <= self.plan.max_version_lag

    def teardown(self) -> None:
        """One generator is enough to come to the end, and every prompt was trained on once."""
        if not hasattr(self, "plan"):
            return
        for worker in range(3):
            self.lose(worker)
        for _ in range(10 * TOTAL_STEPS * self.plan.prompts_per_batch):
            if len(self.trained) == TOTAL_STEPS:
                break
            for number in self.ledger.wanted():
                self.ledger.issue(number, b"prompt %d" % number)
            for stage in range(len(self.plan.lease_s)):
                leases = self.ledger.take(stage, 3, 1, self.now_s)
                self.add(leases)
                for lease in leases:
                    self.leases.remove(lease)
                    self.finish(lease)
            self.train()
            self.published = len(self.trained)
            self.ledger.publish(self.generation, self.published)
        numbers = [number for step in self.trained for number in step]
        assert sorted(numbers) == list(range(self.plan.prompts or 0))


def make_ledger(batch: int = 2, group: int = 1, **options: Any) -> RolloutLedger:
    ledger = RolloutLedger(RolloutPlan(batch, group, **options))
    ledger.open(0, Consumed())
    return ledger


def issue_all(ledger: RolloutLedger) -> None:
    for number in ledger.wanted():
        ledger.issue(number, b"p")


def take(ledger: RolloutLedger, count: int = 100, now_s: float = 0.0) -> list[TaskLease]:
    issue_all(ledger)
    return ledger.take(0, 0, count, now_s)


def finish(ledger: RolloutLedger, *leases: TaskLease, sample: bytes = b"s") -> None:
    for lease in leases:
        assert ledger.done(lease.number, lease.attempt, [sample] * ledger.plan.group)


def test_lag_0_takes_turns_and_does_not_stop() -> None:
    """torchforge#557: what is begun counts from the published version."""
    ledger = make_ledger(batch=3, max_version_lag=0)
    for step in range(200):
        leases = take(ledger)
        assert [it.number for it in leases] == [3 * step, 3 * step + 1, 3 * step + 2]
        assert take(ledger) == []
        finish(ledger, *leases)
        assert take(ledger) == []
        assert ledger.read(3 * step, 3 * step + 3) is not None
        assert ledger.read(3 * step + 3, 3 * step + 4) is None
        ledger.publish(0, step + 1)


def test_prompts_are_passed_over_until_they_are_due() -> None:
    ledger = make_ledger(batch=2, max_version_lag=1)
    leases = take(ledger)
    assert [it.number for it in leases] == [0, 1, 2, 3]
    slow = leases.pop(1)
    finish(ledger, *leases)
    assert ledger.read(0, 2) == [(0, (b"s",)), (2, (b"s",))]
    assert ledger.consumed_at(2) == Consumed(1, frozenset({2}))
    ledger.publish(0, 1)
    finish(ledger, *take(ledger))  # 4 and 5, begun at version 1
    assert ledger.read(2, 4) is None, "1 was begun at version 0, and is due"
    assert [number for number, _ in ledger.read(2, 3) or ()] == [3]
    finish(ledger, slow)
    assert [number for number, _ in ledger.read(2, 4) or ()] == [3, 1]


def test_straggler_is_begun_again_with_newer_weights() -> None:
    ledger = make_ledger(batch=2, max_version_lag=1)
    leases = take(ledger)
    slow = leases.pop(1)
    finish(ledger, *leases)
    ledger.read(0, 2)
    ledger.publish(0, 1)
    finish(ledger, *take(ledger, 1))
    assert ledger.read(2, 4) is None
    assert not ledger.expire(slow.until_s - 1)
    assert ledger.expire(slow.until_s)
    assert [number for number, _ in ledger.read(2, 4) or ()] == [3, 4], "it is not due any more"
    again = ledger.take(0, 1, 2, slow.until_s)
    assert [it.number for it in again] == [1, 5]
    assert not ledger.done(slow.number, slow.attempt, [b"late"])
    finish(ledger, *again)
    assert [number for number, _ in ledger.read(4, 6) or ()] == [1, 5]


def test_extended_lease_stays() -> None:
    ledger = make_ledger(lease_s=(10.0,))
    first, second = take(ledger, 2)
    ledger.extend([second.attempt], 9.0)
    assert ledger.expire(10.0)
    assert not ledger.expire(18.9)
    finish(ledger, second)
    assert not ledger.done(first.number, first.attempt, [b"s"])


def test_bytes_stop_what_is_begun_but_not_the_next_batch() -> None:
    """A prompt has 1 byte, its samples 100: with what is being made, 9 fit."""
    ledger = make_ledger(batch=4, max_version_lag=9, max_bytes=1000)
    finish(ledger, *take(ledger, 1), sample=b"x" * 100)
    begun = take(ledger)
    assert len(begun) == 8
    finish(ledger, *begun, sample=b"x" * 100)
    assert take(ledger) == []
    held = ledger.counts().nbytes
    assert 900 <= held <= 1000
    ledger.read(0, 8)
    assert ledger.counts().nbytes == held, "the trainer may read it again"
    more = take(ledger)
    assert 0 < len(more) + ledger.counts().ready <= 4, "as many as the next batch needs"
    finish(ledger, *more, sample=b"x" * 100)
    assert ledger.read(8, 12) is not None
    ledger.publish(0, 2)
    assert ledger.counts().nbytes < 550
    assert take(ledger) != []


def test_stages_have_their_own_workers_and_content() -> None:
    ledger = make_ledger(batch=2, group=2, lease_s=(10.0, 20.0))
    lease = take(ledger, 1)[0]
    assert ledger.take(1, 5, 1, 0.0) == []
    assert ledger.done(lease.number, lease.attempt, [b"a", b"b"])
    [reward] = ledger.take(1, 5, 9, 3.0)
    assert (reward.prompt, reward.content, reward.until_s) == (b"p", (b"a", b"b"), 23.0)
    ledger.lose([5])
    [reward] = ledger.take(1, 6, 9, 4.0)
    assert reward.content == (b"a", b"b")
    counts = ledger.counts()
    assert (counts.waiting, counts.leased, counts.ready, counts.read) == ((5, 0), (0, 1), 0, 0)
    assert ledger.done(reward.number, reward.attempt, [b"A", b"B"])
    assert ledger.read(0, 1) == [(0, (b"A", b"B"))]


def test_counts_tell_how_old_the_newest_batch_is() -> None:
    ledger = make_ledger(batch=2, max_version_lag=2)
    assert (ledger.counts().lag_mean, ledger.counts().lag_max) == (None, None)
    finish(ledger, *take(ledger, 3))  # begun at version 0
    ledger.publish(0, 1)
    finish(ledger, *take(ledger, 1))
    ledger.read(0, 2)
    assert (ledger.counts().lag_mean, ledger.counts().lag_max) == (0.0, 0)
    ledger.read(2, 4)  # the step after the first: one of its two is made of its own weights
    counts = ledger.counts()
    assert (counts.lag_mean, counts.lag_max) == (0.5, 1)
    assert (counts.read, counts.published, counts.max_version_lag) == (4, 1, 2)
    take(ledger, 2)
    assert ledger.expire(1e9)
    assert ledger.counts().expired == (2,)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (1, 1, -1), (1, 1, 0, ()), (1, 1, 0, (0.0,))])
def test_sizes_are_checked(sizes: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="max_version_lag 0 or more"):
        RolloutPlan(*sizes)


def test_wrong_requests_are_errors() -> None:
    ledger = make_ledger(group=2)
    [lease] = take(ledger, 1)
    with pytest.raises(DataError, match="1 samples of prompt 0"):
        ledger.done(lease.number, lease.attempt, [b"s"])
    ledger.open(3, Consumed(4))
    with pytest.raises(DataError, match="rollouts from position 3"):
        ledger.read(3, 5)


def test_what_another_run_has_consumed_is_not_used() -> None:
    """The function has loaded a checkpoint of one: ahead of this buffer's log, or beside it."""
    for is_ahead in (True, False):
        ledger = make_ledger(batch=2, max_version_lag=1)
        finish(ledger, *take(ledger))
        assert is_ahead or ledger.read(0, 2) == [(0, (b"s",)), (1, (b"s",))]
        ledger.open(1, Consumed(1, frozenset({2})))
        assert ledger.counts().nbytes == 4, "of two tasks"
        assert [number for number, _ in ledger.read(2, 4) or ()] == [1, 3]


TestCourses = Course.TestCase
TestCourses.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def draw_course(rng: Random, length: int) -> Course:
    """A longer course than hypothesis makes, of which most is work."""
    course = Course()
    course.begin(
        batch=rng.randint(1, 5),
        group=rng.randint(1, 2),
        lag=rng.randint(0, 3),
        stages=rng.randint(1, 2),
        max_bytes=rng.choice([0, 40, 10**9]),
    )
    for _ in range(length):
        match rng.choice(["work"] * 8 + [*"aitdlwpgbo"]):
            case "work":
                workers = [rng.randrange(3) for _ in range(rng.randint(1, 4))]
                course.work(workers, rng.randint(0, 3), rng.random() < 0.6)
            case "i":
                course.issue(rng.randrange(1000), rng.randrange(1000))
            case "t":
                course.take(rng.randrange(3), rng.randint(1, 3), rng.randrange(2))
            case "d" if course.leases:
                rng.choice([course.done, course.drop])(rng.randrange(1000))
            case "l":
                course.lose(rng.randrange(3))
            case "w":
                course.wait(rng.choice([1.0, LIMIT_S]))
            case "p":
                course.publish(rng.randrange(1000))
            case "g":
                course.go_back(rng.randrange(1000), rng.random() < 0.3)
            case "b":
                course.lose_buffer()
            case "o":
                course.open_again()
        course.each_prompt_once_in_exact_batches()
    return course


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_long_courses(first: int) -> None:
    extras = steps = 0
    for seed in range(first, first + 100):
        course = draw_course(Random(seed), 40)
        steps += len(course.trained)
        extras += bool(course.consumed().extras)
        course.teardown()
    assert steps > 300
    assert extras > 5, "no prompt was passed over"

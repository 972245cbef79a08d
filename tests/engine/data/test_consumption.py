"""A loader over a log of groups that is written while it is read: each prompt once, at any number
of ranks, through rewinds and losses of the log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rayzero
from rayzero.engine.builder import make_loader
from rayzero.engine.data.consumed import Consumed
from rayzero.engine.data.consumption import STATE_NAME, LogSource
from rayzero.engine.data.loader import StepLoader
from rayzero.engine.data.micro_batches import MicroBatches
from rayzero.engine.data.sampling import StepSplit, TrainingProgress, assign_step
from rayzero.engine.errors import ConfigError, DataError, EngineError
from rayzero.engine.session import Reforming, use_session
from tests.engine.generations import Generations, end_together, shared_store
from tests.engine.state.blocks import BlocksSource, StateSession
from tests.support.ranks import run_ranks
from tests.workers.recovery_jobs import Data, engine_config, make_model

GROUP, PROMPTS, BATCH = 3, 5, 12  # groups are cut by two ranks' parts


class MemoryLog:
    """A log in memory. Prompts stand in it out of order, by at most `spread`: the order is a
    function of the seed, so that ranks in processes of their own have the same."""

    def __init__(self, seed: int = 0, group: int = GROUP, spread: int = 4) -> None:
        self.length, self.group = PROMPTS * group, group
        self._seed, self._spread = seed, spread
        self._base, self._numbers = Consumed(), list[int]()
        self.rewritten = 0

    def lose(self, seed: int) -> None:
        """What follows is in another order."""
        self._base, self._numbers, self._seed = Consumed(), [], seed

    def open(self, consumed: Consumed, check: Callable[[], None]) -> None:
        ahead = len(consumed) - len(self._base)
        if 0 <= ahead <= len(self._numbers) and self._at(ahead) == consumed:
            return
        self._base, self._numbers = consumed, []
        self.rewritten += 1

    def read(self, start: int, count: int, check: Callable[[], None]) -> list[tuple[int, Any]]:
        check()
        samples = []
        for position in range(start, start + count):
            group, member = divmod(position, self.group)
            sample = self._number(group) * self.group + member
            samples.append((sample, self.sample(sample)))
        return samples

    def sample(self, number: int) -> Any:
        return torch.tensor(number)

    def consumed_at(self, position: int, check: Callable[[], None]) -> Consumed:
        self._number(position // self.group - 1)
        return self._at(position // self.group - len(self._base))

    def _at(self, ahead: int) -> Consumed:
        return self._base.add(self._numbers[:ahead])

    def _number(self, position: int) -> int:
        while len(self._base) + len(self._numbers) <= position:
            known = self._at(len(self._numbers))
            free = [it for it in range(known.frontier + 99) if it not in known][: self._spread]
            place = len(self._base) + len(self._numbers)
            self._numbers.append(Random(f"{self._seed}-{place}").choice(free))
        assert position >= len(self._base), "gone"
        return self._numbers[position - len(self._base)]


class Registered:
    """The part of a training state that stores values."""

    def __init__(self, restored: Any = None) -> None:
        self._restored = restored

    def register(self, name: str, get: Callable[[], Any], set: Callable[[Any], object]) -> None:  # noqa: A002
        assert name == STATE_NAME
        self.get = get
        if self._restored is not None:
            set(self._restored)


class Rank:
    """One process: its loader, and what it would store with the state."""

    def __init__(
        self, log: MemoryLog, world: int, rank: int, micro_batch: int, step: int, saved: Any
    ) -> None:
        self.progress = TrainingProgress(step, sample_cursor=step * BATCH, global_batch=BATCH)
        self.state = Registered(saved)
        plan = StepSplit(assign_step(BATCH, world, rank, micro_batch))
        self.own = MicroBatches(self.progress, plan)
        source = LogSource(log, self.progress, self.state.register)
        self.loader = StepLoader(source, self.own)

    def train(self, steps: int) -> list[list[int]]:
        """The samples of each step that this rank has trained on."""
        trained = [list[int]() for _ in range(steps)]
        for turn, batch in enumerate(self.loader.steps(steps)):
            self.own.on_forward(batch)
            weight = self.own.begin_backward(step_due=False)
            trained[turn // self.loader.micro_steps] += batch.tolist() if weight else []
            ends = (turn + 1) % self.loader.micro_steps == 0
            self.own.begin_step(ends_step=ends)
            self.progress.micro_step = 0 if ends else self.progress.micro_step + 1
            if ends:
                self.progress.step += 1
                self.progress.sample_cursor += BATCH
            self.own.end_step()
        return trained


@settings(max_examples=60, deadline=None)
@given(
    micro_batch=st.integers(1, 5),
    course=st.lists(
        st.tuples(
            st.integers(1, 3), st.integers(0, 3), st.integers(0, 3), st.booleans(), st.booleans()
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_each_prompt_once_at_any_world_size(
    micro_batch: int, course: list[tuple[int, int, int, bool, bool]]
) -> None:
    """Generations of (ranks, steps, steps that are lost at its end, whether the log is lost)."""
    log = MemoryLog()
    history: list[list[int]] = []
    saved: dict[int, Any] = {0: None}
    for number, (world, steps, lost, loses_log, reads_ahead) in enumerate(course):
        begin = len(history)
        ranks = [Rank(log, world, rank, micro_batch, begin, saved[begin]) for rank in range(world)]
        if reads_ahead:  # and trains on none of it: the process is gone
            for rank in ranks:
                list(rank.loader.steps(2))
        for step in range(steps):
            parts = [rank.train(1)[0] for rank in ranks]
            history.append([sample for part in parts for sample in part])
            values = [rank.state.get() for rank in ranks]
            assert values == [values[0]] * world
            saved[begin + step + 1] = values[0]
        del history[max(0, len(history) - lost) :]
        if loses_log:
            log.lose(seed=number + 1)
        trained = [sample for step in history for sample in step]
        assert len(set(trained)) == len(trained) == len(history) * BATCH
        for start in range(0, len(trained), GROUP):  # a group is adjacent
            first = trained[start]
            assert trained[start : start + GROUP] == list(range(first, first + GROUP))
            assert first % GROUP == 0
        consumed = Consumed().add(sample // GROUP for sample in trained[::GROUP])
        expected = {"frontier": consumed.frontier, "extras": sorted(consumed.extras)}
        assert (saved[len(history)] or {"frontier": 0, "extras": []}) == expected
        assert set(range(consumed.frontier)) <= {sample // GROUP for sample in trained}


def test_the_same_log_is_read_again_after_a_rewind() -> None:
    log = MemoryLog()
    first = Rank(log, 1, 0, 4, 0, None)
    steps = first.train(2)
    middle = first.state.get()
    steps += first.train(2)
    again = Rank(log, 1, 0, 2, 2, middle)
    assert again.train(2) == steps[2:]
    assert log.rewritten == 0


def test_epochs_are_counted_by_position() -> None:
    loader = Rank(MemoryLog(), 1, 0, BATCH, 0, None).loader
    assert len(loader) == 2  # 15 samples, in steps of 12


def test_a_loop_that_reads_ahead_continues_behind_it() -> None:
    rank = Rank(MemoryLog(), 1, 0, BATCH, 0, None)
    ahead = list(rank.loader.steps(2))
    batches = rank.loader.steps(1)
    ahead.append(next(batches))
    assert len({int(it) for batch in ahead for it in batch}) == 3 * BATCH
    rank.own._untrained.clear()


def test_a_step_has_whole_groups() -> None:
    progress = TrainingProgress(global_batch=10)
    with pytest.raises(ConfigError, match="10 samples, with 3 samples of each prompt"):
        LogSource(MemoryLog(), progress, Registered().register)


@pytest.mark.parametrize("saved", [None, {"frontier": 3, "extras": []}])
def test_state_of_other_samples_is_refused(saved: Any) -> None:
    """Of a run over a dataset, or with another group."""
    rank = Rank(MemoryLog(), 1, 0, 4, 2, saved)
    with pytest.raises(EngineError, match="counts 24 samples, and"):
        rank.train(1)
    with pytest.raises(EngineError, match="load only the weights"):
        rank.state.get()


def test_a_prompt_cannot_be_consumed_twice() -> None:
    consumed = Consumed().add([0, 2])
    assert consumed == Consumed(1, frozenset({2}))
    assert [it in consumed for it in range(4)] == [True, False, True, False]
    assert consumed.add([1]) == Consumed(3)
    for number in (0, 2):
        with pytest.raises(DataError, match=f"prompt {number} is in the log of rollouts twice"):
            consumed.add([number])


class StuckLog(MemoryLog):
    """A log without generators: reads wait until they are to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.stopped = threading.Event(), threading.Event()

    def read(self, start: int, count: int, check: Callable[[], None]) -> list[tuple[int, Any]]:
        self.waits.set()
        pause = threading.Event()
        try:
            while not pause.wait(0.001):
                check()
        finally:
            self.stopped.set()
        raise AssertionError


class Phases:
    """A session that ends the generation, once the loader has shown some signs of life."""

    def __init__(self) -> None:
        self.signs = 0

    def on_phase(self, name: str) -> None:
        self.signs += 1
        if self.signs == 4:
            raise SystemExit("the generation has ended")


def test_waiting_shows_signs_of_life_and_ends_with_the_generation() -> None:
    log = StuckLog()
    rank = Rank(log, 1, 0, 4, 0, None)
    rank.own.session = rank.loader._session = Phases()  # type: ignore[assignment]
    with pytest.raises(SystemExit):
        next(rank.loader.steps(1))
    assert log.stopped.wait(60), "the thread reads on"
    assert rank.progress.data_wait_s > 0.2


def test_waiting_ends_where_steps_are_split_anew() -> None:
    """After a repair in place the loop reads for the present ranks."""
    log = StuckLog()
    rank = Rank(log, 2, 0, 4, 0, None)

    class Repair:
        undoes_step = False

        def before_read(self, loader: object) -> None:
            if log.waits.is_set() and not log.stopped.is_set():
                rank.own.recut(StepSplit(assign_step(BATCH, 1, 0, BATCH)))
                log.read = MemoryLog.read.__get__(log)  # type: ignore[method-assign]

    rank.loader._reforming = cast(Reforming, Repair())
    assert len(next(rank.loader.steps(1))) == BATCH
    assert log.stopped.wait(60)
    rank.own._untrained.clear()


# Engines on several ranks, against plain torch.

SIZES, STEPS_EACH, LOST_AT = (2, 3, 1, 3), 2, 2


class RegressionLog(MemoryLog):
    def sample(self, number: int) -> Any:
        return Data()[number]


def train_through(rank: int, world: int, stage: int, how: Any) -> dict[str, Tensor]:
    """Trains through groups of other sizes: survivors are re-cut in the middle of a step, or all
    build their engines anew. The log is lost once, on all ranks."""
    store, log, weights = shared_store(rank), RegressionLog(seed=4), dict[str, Tensor]()
    generations = Generations(rank, SIZES, how, store)
    while not generations.is_last:
        if generations.form():
            weights = _train_as_member(generations, stage, log)
    end_together(store, rank, world)
    return weights


def _train_as_member(generations: Generations, stage: int, log: MemoryLog) -> dict[str, Tensor]:
    config = engine_config(stage) | {"train_batch_size": BATCH}
    with use_session(StateSession(generations.blocks() or None)):
        engine, *_ = rayzero.initialize(model=make_model(torch.float64), config=config)
    source = LogSource(log, engine.progress, engine.state.register)
    loader = make_loader(engine.internals, source, None)
    begin, published = engine.global_steps, -1
    if generations.number >= LOST_AT:
        log.lose(seed=1)
    for x, y in loader.until(STEPS_EACH * len(SIZES)):
        if engine.global_steps == begin + STEPS_EACH and not generations.is_last:
            if published != generations.number:
                generations.publish(engine)
                published = generations.number
            engine.backward(nn.functional.mse_loss(engine(x), y))  # of a step that never ends
            if generations.how == "rebuild" or not generations.form():
                engine.close()
                return {}
            if generations.number == LOST_AT:
                log.lose(seed=1)
            keep = generations.how == "own"
            engine.survival.recut(BlocksSource(generations.blocks()), keep=keep)
            begin = engine.global_steps
            continue
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
    weights: dict[str, Tensor] = engine.module_state_dict()
    engine.close()
    return weights


def plain_torch(sizes: Sequence[int]) -> dict[str, Tensor]:
    model = make_model(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    log = RegressionLog(seed=4)
    for step in range(STEPS_EACH * len(sizes)):
        if step == LOST_AT * STEPS_EACH:
            consumed = log.consumed_at(step * BATCH, lambda: None)
            assert consumed.extras, "nothing was passed over"
            log.lose(seed=1)
            log.open(consumed, lambda: None)
        batch = [sample for _, sample in log.read(step * BATCH, BATCH, lambda: None)]
        optimizer.zero_grad()
        x, y = torch.stack([it[0] for it in batch]), torch.stack([it[1] for it in batch])
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("how", ["own", "source", "rebuild"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_are_those_of_plain_torch_over_the_log(stage: int, how: str) -> None:
    results = run_ranks(3, train_through, stage, how)
    for name, expected in plain_torch(SIZES).items():
        torch.testing.assert_close(results[0][name], expected, rtol=1e-9, atol=1e-12)

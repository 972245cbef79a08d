"""Loops that read ahead, leave out, repeat or end early: plain torch's weights, or an error."""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rayzero
from rayzero.engine.data.loader import StepLoader
from rayzero.engine.data.sampling import SampleOrder
from rayzero.engine.errors import EngineError
from tests.engine.data.loops import (
    LR,
    Batch,
    Outcome,
    Shape,
    expected_samples,
    in_a_thread,
    make_data,
    make_model,
    plain_weights,
    run_loop,
    shapes,
)
from tests.support.ranks import run_ranks

SAMPLES, BATCH, STEPS = 49, 7, 12


class Loop:
    """An engine over `make_data`: micro-batches of 2, 2, 2 and 1 samples a step."""

    def __init__(self, stage: int = 1, **config: Any) -> None:
        self.engine, self.optimizer, loader, _ = rayzero.initialize(
            model=make_model(),
            training_data=make_data(SAMPLES),
            config={
                "gradient_clipping": 0,
                "train_batch_size": BATCH,
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "SGD", "params": {"lr": LR}},
                "zero_optimization": {"stage": stage},
                **config,
            },
        )
        assert loader is not None
        self.loader: StepLoader = loader

    def loss(self, batch: Batch, *, copied: bool = False) -> Tensor:
        inputs, targets = (it.clone() for it in batch) if copied else batch
        return nn.functional.mse_loss(self.engine(inputs), targets)

    def train(self, batch: Batch, *, copied: bool = False) -> None:
        self.engine.backward(self.loss(batch, copied=copied))
        self.engine.step()

    def assert_plain(self, steps: int = STEPS) -> None:
        assert self.engine.global_steps == steps
        order = SampleOrder(SAMPLES, 0)
        samples = [order.indices(step * BATCH, BATCH).tolist() for step in range(steps)]
        expected = plain_weights(samples, make_data(SAMPLES))
        torch.testing.assert_close(self.engine.state_dict(), expected)


def leave_one_out(loop: Loop, *, copied: bool = False) -> None:
    for turn, batch in enumerate(loop.loader.until(STEPS)):
        if turn != 5:
            loop.train(batch, copied=copied)


def leave_one_out_of_an_epoch(loop: Loop, *, threaded: bool = False) -> None:
    for _ in loop.loader.epochs(2):
        for turn, batch in enumerate(in_a_thread(loop.loader, 2) if threaded else loop.loader):
            if turn != 5:
                loop.train(batch, copied=True)
            del batch


def train_twice(loop: Loop, *, copied: bool = False) -> None:
    for batch in loop.loader.steps(1) if copied else loop.loader.until(STEPS):
        loop.train(batch, copied=copied)
        loop.train(batch, copied=copied)


def step_at_the_boundary_only(loop: Loop) -> None:
    for turn, batch in enumerate(loop.loader.until(STEPS)):
        loop.engine.backward(loop.loss(batch))
        if turn % 4 == 3:
            loop.engine.step()


def cycle(loop: Loop) -> None:
    batches = itertools.cycle(loop.loader)
    for _ in range(4 * STEPS):
        loop.train(next(batches))


def step_the_optimizer(loop: Loop) -> None:
    for batch in loop.loader.until(STEPS):
        loop.engine.backward(loop.loss(batch))
        loop.optimizer.step()  # type: ignore[union-attr]


def accumulate_without_the_config(loop: Loop) -> None:
    for turn, batch in enumerate(loop.loader.until(STEPS)):
        loop.engine.set_gradient_accumulation_boundary(turn % 2 == 1)
        loop.engine.backward(loop.loss(batch))
        loop.engine.step()


ONE_MORE = "yielded 1 micro-batch more than the loop trained on"


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        (leave_one_out, "micro-batch 2 of step 2 was read and not trained on"),
        (train_twice, "micro-batch 1 of step 1, which was trained on before"),
        (
            step_at_the_boundary_only,
            r"micro-batch 2 of step 1 came before the step\(\) of micro-batch 1 of step 1",
        ),
        (cycle, "micro-batch 1 of step 1, which was trained on before"),
        (step_the_optimizer, r"optimizer.step\(\) was called on the engine's optimizer"),
        (accumulate_without_the_config, "a step ended with micro-batch 2 of step 1"),
        (partial(leave_one_out, copied=True), ONE_MORE),
        (leave_one_out_of_an_epoch, "more than the loop trained on"),
        (partial(leave_one_out_of_an_epoch, threaded=True), "more than the loop trained on"),
        (partial(train_twice, copied=True), "a batch that the loader has not yielded"),
    ],
)
def test_other_loops_are_refused(body: Callable[[Loop], None], seen: str) -> None:
    loop = Loop()
    with pytest.raises(EngineError, match=seen):  # noqa: PT012
        body(loop)
        loop.engine.internals.micro_batches.check_end()


def test_a_last_batch_that_is_left_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(train_micro_batch_size_per_gpu=BATCH)
    for turn, batch in enumerate(loop.loader.until(STEPS)):
        if turn != STEPS - 1:
            loop.train(batch)
    with caplog.at_level(logging.WARNING):
        loop.engine.internals.micro_batches.check_end()
    assert ONE_MORE in caplog.text
    loop.assert_plain(STEPS - 1)


def test_a_last_batch_that_is_read_and_left_for_a_loop_that_ends_is_an_error() -> None:
    """The second loop takes it for one that the first has yet to train on."""
    loop = Loop(train_micro_batch_size_per_gpu=BATCH)
    for again in (False, True):
        for _ in loop.loader.epochs(1):
            for turn, batch in enumerate(list(loop.loader)):
                if turn == SAMPLES // BATCH - 1 and not again:
                    break
                loop.train(batch)
    with pytest.raises(EngineError, match=ONE_MORE):
        loop.engine.internals.micro_batches.check_end()


def test_a_loop_that_ends_within_a_step_says_so(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    for batch in itertools.islice(loop.loader.until(STEPS), 6):
        loop.train(batch)
    with caplog.at_level(logging.WARNING):
        loop.engine.internals.micro_batches.check_end()
    assert "the training loop ended with micro-batch 2 of step 2" in caplog.text


class QueueThatGrows(deque[Any]):
    """A thread appends to it, if it may, between the first look at it and its items."""

    def __init__(self, items: Iterable[Any], append: Callable[[], object]) -> None:
        super().__init__(items)
        self.thread = Thread(target=append)

    def __iter__(self) -> Iterator[Any]:
        items = super().__iter__()
        if self.thread.ident is None:
            self.thread.start()
            self.thread.join(0.2)  # it waits for the lock
        return items


def test_thread_that_reads_while_a_backward_looks_for_its_batch() -> None:
    loop = Loop()
    batches = iter(loop.loader.until(STEPS))
    first = next(batches)
    own = loop.engine._step.micro_batches
    own._untrained = queue = QueueThatGrows(own._untrained, lambda: next(batches))
    loop.train(first, copied=True)
    queue.thread.join(60)
    assert len(queue) == 1


EXAMPLES = int(os.environ.get("RAYZERO_LOOP_EXAMPLES", "40"))
"""500 take six minutes."""


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(shapes(), st.sampled_from([0, 2, 3]))
def test_random_loops(shape: Shape, world: int) -> None:
    check(shape, run_ranks(world, run_loop, shape))


READ_AHEAD = (
    [{"ahead": ahead, "threaded": ahead == 2} for ahead in (0, 1, 2, None)]
    + [{"ahead": 1, "over": "chained epochs"}, {"ahead": 1, "over": "epochs"}]
    + [{"ahead": None, "losses": 2}, {"ahead": None, "own_backward": True}]
)
LEFT = [{"ahead": 1, "stops": (9,)}, {"ahead": None, "stops": (9,)}]  # in the middle of a step


@pytest.mark.parametrize(
    "more", [*LEFT, *(one | {"copied": copied} for one in READ_AHEAD for copied in (False, True))]
)
def test_loops_that_read_ahead_train_as_one_by_one(more: dict[str, Any]) -> None:
    """Micro-batches of 2, 2, 2 and 1 samples a step."""
    shape = Shape(stage=1, batch=7, micro_batch=2, **more)
    outcomes = run_ranks(0, run_loop, shape)
    assert outcomes[0].error is None
    check(shape, outcomes)


def check(shape: Shape, outcomes: list[Outcome]) -> None:
    errors = {outcome.error for outcome in outcomes}
    if any(errors):
        assert shape.may_fail, errors
        # On every rank; a reading thread that a nested loop closes may have ended on some.
        assert all(errors) or shape.threaded
        return
    samples = [
        [index for part in ranks for index in part]
        for ranks in zip(*(outcome.samples for outcome in outcomes), strict=True)
    ]
    if not shape.mistakes:
        assert samples == expected_samples(shape)
    torch.testing.assert_close(outcomes[0].weights, plain_weights(samples))

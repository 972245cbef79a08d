"""Training loops of random shape end with plain torch's weights over the ledger's samples, or with
an error."""

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.data.loops import (
    Outcome,
    Shape,
    expected_samples,
    plain_weights,
    run_loop,
    shapes,
)
from tests.support.ranks import run_ranks

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

"""Training loops of random shape end with plain torch's weights over the ledger's samples, or with
an error."""

import os

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

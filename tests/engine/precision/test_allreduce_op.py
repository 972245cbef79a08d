"""`gradient_allreduce_op: sum`: gradients and their norm are those of the mean, times the ranks."""

from __future__ import annotations

import pytest
import torch

import rayzero
from tests.engine import zoo
from tests.support.ranks import run_ranks


def two_steps(rank: int, world: int, stage: int, op: str) -> tuple[float, list[torch.Tensor]]:
    model = zoo.make_model(torch.float64)
    engine, *_ = rayzero.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0,
            "gradient_allreduce_op": op,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1 if op == "SUM" else 0.2}},
            "zero_optimization": {"stage": stage},
        },
    )
    zoo.train(engine, list(zoo.batches(2, 8)), 2)
    norm = engine.metrics.grad_norm
    assert norm is not None
    return norm, [value.clone() for value in engine.state_dict().values()]


@pytest.mark.parametrize("stage", [0, 2])
def test_sum_is_the_mean_times_the_ranks(stage: int) -> None:
    (summed, with_sum), _ = run_ranks(2, two_steps, stage, "SUM")
    (mean, with_mean), _ = run_ranks(2, two_steps, stage, "mean")
    assert summed == pytest.approx(2 * mean)
    for one, other in zip(with_sum, with_mean, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

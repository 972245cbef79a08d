"""Main weights in bfloat16: equal to plain torch loops over bfloat16 parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from tests.engine import zoo
from tests.support.ranks import run_ranks

SAMPLES, STEPS, LR = 8, 4, 0.02
MAIN = {"enabled": True, "bf16_master_weights_and_grads": True}
STATES = MAIN | {"bf16_optimizer_states": True}


def train(
    rank: int, world: int, bf16: dict[str, Any], zero: dict[str, Any]
) -> tuple[list[Tensor], set[torch.dtype], dict[str, int]]:
    engine, *_ = rayzero.initialize(
        model=zoo.make_model(torch.float32),
        config={
            "train_batch_size": SAMPLES,
            "gradient_clipping": 0,
            "bf16": bf16,
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
            "zero_optimization": zero,
        },
    )
    zoo.train(engine, zoo.batches(STEPS, SAMPLES))
    assert engine.optimizer is not None
    states = {
        value.dtype
        for state in engine.optimizer.state.values()
        for value in state.values()
        if value.ndim
    }
    return [*engine.state_dict().values()], states, engine.metrics.bytes


def plain(state_dtype: torch.dtype) -> list[Tensor]:
    """Plain torch: bfloat16 gradients; updates in `state_dtype`, rounded to bfloat16 weights."""
    model = zoo.make_model(torch.float32).to(torch.bfloat16)
    params = [param for param in model.parameters() if param.requires_grad]
    copies = [torch.nn.Parameter(param.detach().to(state_dtype, copy=True)) for param in params]
    optimizer = torch.optim.AdamW(copies, lr=LR, weight_decay=0.1, fused=True)
    for batch in zoo.batches(STEPS, SAMPLES):
        model.zero_grad()
        model(batch[:, :-1], targets=batch[:, 1:])["loss"].backward()
        for param, copy in zip(params, copies, strict=True):
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            copy.data, copy.grad = param.data.to(state_dtype), grad.to(state_dtype)
        optimizer.step()
        for param, copy in zip(params, copies, strict=True):
            param.data.copy_(copy.data)
    return [*model.state_dict().values()]


@pytest.mark.parametrize("states", [torch.bfloat16, torch.float32])
def test_equals_plain_torch(states: torch.dtype) -> None:
    bf16 = STATES if states is torch.bfloat16 else MAIN
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    weights, dtypes, _ = run_ranks(0, train, bf16, zero)[0]
    assert dtypes == {states}
    for actual, expected in zip(weights, plain(states), strict=True):
        assert torch.equal(actual.bfloat16(), expected)  # buffers are float32 here


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_stay_near_it(stage: int) -> None:
    weights, _, sizes = run_ranks(2, train, STATES, {"stage": stage})[0]
    for actual, expected in zip(weights, plain(torch.bfloat16), strict=True):
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0.05, atol=2 * LR)
    assert sizes["main_weights"] == 0
    assert sizes["optimizer_state"] <= 1.2 * sizes["model_weights"]  # two moments of a half

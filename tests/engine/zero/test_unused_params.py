"""Parameters that no rank uses in a step: a gradient of zero, none, or an error, as configured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from rayzero.engine.errors import ConfigError, EngineError
from tests.engine.zero.mixture import STEPS, Mixture, batches, make_mixture
from tests.support.ranks import run_ranks

MICRO_STEPS = 2
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    # Its state does not begin with zeros, and it has no count of steps in its update.
    "torch.optim.Rprop": (torch.optim.Rprop, {"lr": 0.01}),
}


def make_engine(stage: int, optimizer: str, unused: str, zero: dict[str, Any]) -> rayzero.Engine:
    engine, *_ = rayzero.initialize(
        model=make_mixture("parts" if "leaf_module" in zero else "experts"),
        config={
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": MICRO_STEPS,
            "gradient_clipping": 0,
            "optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer][1]},
            "rayzero": {"unused_gradients": unused},
            "zero_optimization": {"stage": stage, **zero},
        },
    )
    return engine


def train(rank: int, world: int, *args: Any) -> dict[str, Tensor]:
    engine = make_engine(*args)
    for batch in batches(rank):
        engine.backward(engine(batch))
        engine.step()
    state = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.close()
    return state


def train_plain(optimizer: str, unused: str) -> tuple[Mixture, int]:
    """PyTorch's weights, and how often an expert was used by no rank after it was used."""
    model, (kind, params) = make_mixture("experts"), OPTIMIZERS[optimizer]
    update, skipped = kind(model.parameters(), **params), 0
    for step in range(0, STEPS, MICRO_STEPS):
        update.zero_grad()
        for rank in range(2):
            for batch in batches(rank)[step : step + MICRO_STEPS]:
                (model(batch) / (2 * MICRO_STEPS)).backward()
        for param in model.parameters():
            skipped += param.grad is None and param in update.state
            if param.grad is None and unused == "zero":
                param.grad = torch.zeros_like(param)
        update.step()
    return model, skipped


@pytest.mark.parametrize(
    ("stage", "optimizer", "unused", "zero"),
    [
        (0, "SGD", "none", {}),
        (1, "SGD", "zero", {}),
        (2, "SGD", "none", {}),
        (2, "torch.optim.Rprop", "none", {}),
        (3, "SGD", "none", {}),
        (3, "SGD", "zero", {}),
        (3, "SGD", "zero", {"leaf_module": {"classes": ["Experts"]}}),
        (3, "SGD", "none", {"offload_optimizer": {"device": "cpu"}}),
    ],
)
def test_unused_experts_change_as_configured(
    stage: int, optimizer: str, unused: str, zero: dict[str, Any]
) -> None:
    model, skipped = train_plain(optimizer, unused)
    assert skipped > 0, "an expert was left out between two uses"
    trained = run_ranks(2, train, stage, optimizer, unused, zero)[0]
    if "leaf_module" in zero:
        trained = {name.replace("parts", "experts"): value for name, value in trained.items()}
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-12, atol=1e-12)


def refused(rank: int, world: int) -> str:
    engine = make_engine(2, "SGD", "zero", {"ignore_unused_parameters": False})
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    expert = rank  # every other one is unused on all ranks
    rows = torch.cat([torch.full((3, 1), expert), torch.ones(3, 4)], 1).double()
    for micro_step in range(MICRO_STEPS):
        engine.backward(engine(rows))
        if micro_step < MICRO_STEPS - 1:
            engine.step()
    with pytest.raises(EngineError) as seen:
        engine.step()
    after = engine.module_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    engine.close()
    return str(seen.value)


def test_unused_parameters_are_an_error_of_all_ranks_if_not_ignored() -> None:
    messages = run_ranks(2, refused)
    assert len(set(messages)) == 1
    assert "12 parameters got no gradient on any rank in this step: layers." in messages[0]
    assert "ignore_unused_parameters: true" in messages[0]


def test_no_gradient_needs_an_elementwise_update() -> None:
    with pytest.raises(ConfigError, match="not elementwise: Lamb"):
        rayzero.initialize(
            model=make_mixture("experts"),
            config={
                "train_micro_batch_size_per_gpu": 3,
                "optimizer": {"type": "Lamb", "params": {"lr": 0.1}},
                "rayzero": {"unused_gradients": "none"},
            },
        )

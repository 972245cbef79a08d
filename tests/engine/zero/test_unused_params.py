"""Parameters that no rank uses in a step: a gradient of zero, none, or an error, as configured; and
leaf modules of stage 3. A mixture of experts, of which ranks use different ones, or none."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rayzero
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.layout.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
)
from rayzero.engine.layout.units import find_blocks
from tests.engine.equal import Plain, check_equal, make, plain, start
from tests.engine.zoo import Experts, Mixture
from tests.support.ranks import run_ranks

STEPS, MICRO_STEPS = 6, 2


def rprop(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Its state does not begin with zeros, and it has no count of steps in its update."""
    return torch.optim.Rprop(groups, lr=0.01)


def decaying(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1)


def batches() -> list[Tensor]:
    """Random routing of its own for each rank and micro-step, to one or two of the four experts; in
    each third micro-step rank 1 uses no expert at all."""
    draw = torch.Generator().manual_seed(2)
    parts = []
    for number in range(STEPS * 2 * MICRO_STEPS):
        choice = torch.randint(0, 4, (1, 1), generator=draw).double().repeat(3, 1)
        if number % 4 >= MICRO_STEPS and number % 3 == 0:
            choice.fill_(-1)
        parts.append(torch.cat([choice, torch.randn(3, 4, generator=draw).double()], 1))
    size = 2 * MICRO_STEPS
    return [torch.cat(parts[step : step + size]) for step in range(0, len(parts), size)]


def among_user_collectives(engine: Any, part: Tensor) -> None:
    if isinstance(engine, Plain):
        plain(engine, part)
        return
    loss = engine(part)
    dist.all_reduce(loss.detach().clone())
    engine.backward(loss)
    dist.all_reduce(loss.detach())
    engine.step()
    dist.barrier()


LEAVES = {"leaf_module": {"classes": ["Experts"]}}
ROWS: list[tuple[int, Any, str, dict[str, Any]]] = [
    (0, decaying, "none", {}),
    (1, decaying, "zero", {}),
    (2, decaying, "none", {}),
    (2, rprop, "none", {}),
    (3, decaying, "none", {}),
    (3, decaying, "zero", {}),
    (3, decaying, "zero", LEAVES),
    (3, decaying, "none", {"offload_optimizer": {"device": "cpu"}}),
]


def options(stage: int, optimizer: Any, unused: str, zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "stage": stage,
        "optimizer": optimizer,
        "samples": 3 * 2 * MICRO_STEPS,
        "gradient_accumulation_steps": MICRO_STEPS,
        "rayzero": {"unused_gradients": unused},
        "zero": zero,
    }


def test_unused_experts_change_as_configured_among_user_collectives() -> None:
    used = [set(batch[:, 0].tolist()) - {-1.0} for batch in batches()]
    assert any(len(experts) < 4 for experts in used[1:]), "one was left out after its use"
    model = {True: partial(Mixture, "parts"), False: Mixture}
    check_equal(
        [(model[row[3] is LEAVES], among_user_collectives, options(*row)) for row in ROWS],
        batches(),
    )


def refused(rank: int, world: int) -> str:
    zero = {"ignore_unused_parameters": False}
    engine = start(make(Mixture), **options(2, decaying, "zero", zero))
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    # Every other expert is unused on all ranks.
    rows = torch.cat([torch.full((3, 1), rank), torch.ones(3, 4)], 1).double()
    plain(engine, rows)
    engine.backward(engine(rows))
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
    lamb = {"type": "Lamb", "params": {"lr": 0.1}}
    unused = {"unused_gradients": "none"}
    with pytest.raises(ConfigError, match="not elementwise: Lamb"):
        rayzero.initialize(
            model=Mixture(), config={"train_batch_size": 3, "optimizer": lamb, "rayzero": unused}
        )


def test_leaf_modules_are_found_and_have_no_blocks_inside() -> None:
    model = Mixture("parts")

    def blocks(model: Mixture, *classes: str) -> int:
        return len(find_blocks(model, classes))

    assert (blocks(model), blocks(Mixture()), blocks(Mixture(), "Linear")) == (15, 3, 15)
    assert len(set_z3_leaf_modules(model, [Experts])) == 3
    assert get_z3_leaf_modules(model) == [layer.moe for layer in model.layers]
    assert (blocks(model), blocks(model, "Linear")) == (3, 3)
    assert len(unset_z3_leaf_modules(model, ["Experts"])) == 3
    assert blocks(model) == 15
    assert set_z3_leaf_modules_by_name(model, ["layers.0.moe"])[0] == [model.layers[0].moe]
    assert set_z3_leaf_modules_by_suffix(model, ["1.moe"])[0] == [model.layers[1].moe]
    assert blocks(model) == 7
    with pytest.raises(ConfigError, match="class Expert"):
        set_z3_leaf_modules(model, ["Expert"])
    with pytest.raises(ValueError, match=r"called layers\.9"):
        set_z3_leaf_modules_by_name(model, ["layers.9"])

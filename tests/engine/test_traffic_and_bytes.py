"""What moves in a step, and what rests between steps: counted, against the ZeRO formulae."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from tests.support.ranks import run_ranks

Counted = dict[str, dict[str, int]]


class Stack(nn.Module):
    """Blocks and a root; on two and four ranks no unit needs padding."""

    def __init__(self, blocks: int = 6, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))
        self.head = nn.Linear(width, 2 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


PARAMS = sum(param.numel() for param in Stack().parameters())
LARGEST_UNIT = 64 * 128


def config(stage: int, bf16: bool = False, micro_steps: int = 1) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_steps,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 2 * LARGEST_UNIT},
    }


def one_step(engine: rayzero.Engine, micro_steps: int = 1) -> None:
    for _ in range(micro_steps):
        engine.backward(engine(torch.randn(2, 64)))
        engine.step()


def step_traffic(rank: int, world: int, stage: int, micro_steps: int) -> Counted:
    """The traffic of one step, after the first."""
    model = Stack()
    engine, *_ = rayzero.initialize(model=model, config=config(stage, False, micro_steps))
    one_step(engine, micro_steps)
    before = engine.metrics.collectives
    one_step(engine, micro_steps)
    after = engine.metrics.collectives
    names = {name for name in after if after[name] != before.get(name)}
    return {
        name: {
            key: after[name][key] - before.get(name, {"calls": 0, "bytes": 0})[key]
            for key in after[name]
        }
        for name in names
    }


VOTE = {"calls": 1, "bytes": 40}  # norm, loss, three wishes
ALL = PARAMS * 4  # bytes of the parameters


@pytest.mark.parametrize("world", [2, 4])
def test_stage_0_is_one_all_reduce_of_the_gradients(world: int) -> None:
    for traffic in run_ranks(world, step_traffic, 0, 1):
        assert traffic == {"all_reduce": {"calls": 2, "bytes": 2 * ALL}, "vote": VOTE}


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_scatter_gradients_and_gather_weights(stage: int) -> None:
    for traffic in run_ranks(2, step_traffic, stage, 1):
        assert traffic == {
            "reduce_scatter": {"calls": 2, "bytes": ALL},
            "all_gather": {"calls": 2, "bytes": ALL},
            "vote": VOTE,
        }


def test_stage_3_moves_at_most_three_times_the_parameters() -> None:
    for traffic in run_ranks(2, step_traffic, 3, 1):
        blocks, root = 6, 1
        assert traffic["reduce_scatter"] == {"calls": blocks + root, "bytes": ALL}
        # Forward gathers every unit; backward finds the root and the last two blocks still there.
        assert traffic["all_gather"]["calls"] == blocks + root + blocks - 2
        assert traffic["all_gather"]["bytes"] <= 2 * ALL
        assert traffic["vote"] == VOTE
        assert traffic.keys() == {"reduce_scatter", "all_gather", "vote"}


def test_accumulation_costs_stages_0_and_1_nothing_and_stage_2_a_reduction_each() -> None:
    assert run_ranks(2, step_traffic, 0, 3)[0]["all_reduce"]["bytes"] == 2 * ALL
    assert run_ranks(2, step_traffic, 1, 3)[0]["reduce_scatter"]["bytes"] == ALL
    assert run_ranks(2, step_traffic, 2, 3)[0]["reduce_scatter"]["bytes"] == 3 * ALL


def rest(rank: int, world: int, stage: int, bf16: bool) -> tuple[dict[str, int], int]:
    """The engine's own account after two steps, and what really lives on this rank."""
    gc.collect()
    before = _live_bytes()
    engine, *_ = rayzero.initialize(model=Stack(), config=config(stage, bf16))
    one_step(engine)
    one_step(engine)
    gc.collect()
    return engine.metrics.bytes, _live_bytes() - before


def _live_bytes() -> int:
    """Every tensor storage the process holds, once each, whoever holds it."""
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_bytes_at_rest_follow_the_formulae(world: int, stage: int, bf16: bool) -> None:
    model, main = (2, 4) if bf16 else (4, 0)
    over = {
        "model_weights": model / (world if stage >= 3 else 1),
        "main_weights": main / (world if stage >= 1 else 1),
        "main_grads": 4 / (world if stage >= 2 else 1),
        "optimizer_state": 8 / (world if stage >= 1 else 1),
    }
    for told, live in run_ranks(world, rest, stage, bf16):
        for name, each in over.items():
            assert told[name] == PARAMS * each, name
        passing = told["slots"] + told["staging"]
        limit = 0 if world == 1 else 10 * LARGEST_UNIT * 4
        assert passing <= limit
        # What is told is what lives, but for scalars: step counts, the poison of detached weights.
        assert sum(told.values()) <= live <= sum(told.values()) + 4096

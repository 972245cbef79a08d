"""Traffic of a step and memory between steps match the formulas of the ZeRO paper."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

import rayzero
from tests.support.ranks import run_ranks

Traffic = dict[str, dict[str, int]]


class LinearStack(nn.Module):
    """Blocks and a root whose units need no padding on two and four ranks."""

    def __init__(self, blocks: int = 6, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))
        self.head = nn.Linear(width, 2 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


PARAMS = sum(param.numel() for param in LinearStack().parameters())
LARGEST_UNIT = 64 * 128


def config(stage: int, bf16: bool = False, micro_steps: int = 1, **section: Any) -> dict[str, Any]:
    return {
        "rayzero": section,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_steps,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 2 * LARGEST_UNIT},
    }


def train_step(engine: rayzero.Engine, micro_steps: int = 1) -> None:
    for _ in range(micro_steps):
        engine.backward(engine(torch.randn(2, 64)))
        engine.step()


def step_traffic(
    rank: int, world: int, stage: int, micro_steps: int, section: dict[str, Any] | None = None
) -> Traffic:
    """Traffic of the second step, by collective."""
    document = config(stage, False, micro_steps, **(section or {}))
    engine, *_ = rayzero.initialize(model=LinearStack(), config=document)
    train_step(engine, micro_steps)
    before = engine.metrics.collectives
    train_step(engine, micro_steps)
    after = engine.metrics.collectives
    names = {name for name in after if after[name] != before.get(name)}
    return {
        name: {
            key: after[name][key] - before.get(name, {"calls": 0, "bytes": 0})[key]
            for key in after[name]
        }
        for name in names
    }


VOTE = {"calls": 1, "bytes": 48}  # norm, loss, three step requests, a count of ranks
PARAM_BYTES = PARAMS * 4


@pytest.mark.parametrize("world", [2, 4])
def test_stage_0_all_reduces_gradients_once(world: int) -> None:
    for traffic in run_ranks(world, step_traffic, 0, 1):
        assert traffic == {"all_reduce": {"calls": 2, "bytes": 2 * PARAM_BYTES}, "vote": VOTE}


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_reduce_scatter_and_all_gather(stage: int) -> None:
    for traffic in run_ranks(2, step_traffic, stage, 1):
        assert traffic == {
            "reduce_scatter": {"calls": 2, "bytes": PARAM_BYTES},
            "all_gather": {"calls": 2, "bytes": PARAM_BYTES},
            "vote": VOTE,
        }


def test_stage_3_traffic_is_at_most_three_times_the_parameters() -> None:
    for traffic in run_ranks(2, step_traffic, 3, 1):
        blocks, root = 6, 1
        assert traffic["reduce_scatter"] == {"calls": blocks + root, "bytes": PARAM_BYTES}
        # Forward gathers all units; in backward the root and the last two blocks are resident.
        assert traffic["all_gather"]["calls"] == blocks + root + blocks - 2
        assert traffic["all_gather"]["bytes"] <= 2 * PARAM_BYTES
        assert traffic["vote"] == VOTE
        assert traffic.keys() == {"reduce_scatter", "all_gather", "vote"}


def test_only_stage_2_reduces_every_micro_step() -> None:
    assert run_ranks(2, step_traffic, 0, 3)[0]["all_reduce"]["bytes"] == 2 * PARAM_BYTES
    assert run_ranks(2, step_traffic, 1, 3)[0]["reduce_scatter"]["bytes"] == PARAM_BYTES
    assert run_ranks(2, step_traffic, 2, 3)[0]["reduce_scatter"]["bytes"] == 3 * PARAM_BYTES


@pytest.mark.parametrize("stage", [2, 3])
def test_reductions_of_micro_steps_can_wait_for_the_last(stage: int) -> None:
    section = {"reduce_each_micro_step": False}
    traffic = run_ranks(2, step_traffic, stage, 3, section)[0]
    assert traffic["reduce_scatter"]["bytes"] == PARAM_BYTES


def test_long_units_are_reduced_in_parts() -> None:
    for traffic in run_ranks(2, parts_traffic):
        assert traffic["reduce_scatter"] == {"calls": 6 + 2, "bytes": PARAM_BYTES}


def parts_traffic(rank: int, world: int) -> Traffic:
    """Of a second step at stage 3, where a block is one part and the head is two."""
    document = config(3)
    document["zero_optimization"]["reduce_bucket_size"] = LARGEST_UNIT // 2
    engine, *_ = rayzero.initialize(model=LinearStack(), config=document)
    train_step(engine)
    before = engine.metrics.collectives["reduce_scatter"]
    train_step(engine)
    after = engine.metrics.collectives["reduce_scatter"]
    assert engine.metrics.bytes["grad_slots"] <= 3 * 4 * LARGEST_UNIT // 2
    return {"reduce_scatter": {key: after[key] - before[key] for key in after}}


def resident_bytes(rank: int, world: int, stage: int, bf16: bool) -> tuple[dict[str, int], int]:
    """Bytes after two steps: by the engine's metrics, and of live tensors on this rank."""
    gc.collect()
    before = _live_bytes()
    engine, *_ = rayzero.initialize(model=LinearStack(), config=config(stage, bf16))
    train_step(engine)
    train_step(engine)
    gc.collect()
    return engine.metrics.bytes, _live_bytes() - before


def _live_bytes() -> int:
    """Bytes of all tensor storages in the process. Fake tensors have none: a compiler's caches keep
    those of earlier tests."""
    storages = {}
    for value in gc.get_objects():
        if isinstance(value, FakeTensor):
            continue
        if isinstance(value, torch.Tensor) and value.device.type != "meta":
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_resident_bytes_match_the_formulas(world: int, stage: int, bf16: bool) -> None:
    model, main = (2, 4) if bf16 else (4, 0)
    bytes_per_param = {
        "model_weights": model / (world if stage >= 3 else 1),
        "main_weights": main / (world if stage >= 1 else 1),
        "main_grads": 4 / (world if stage >= 2 else 1),
        "optimizer_state": 8 / (world if stage >= 1 else 1),
    }
    for reported, live in run_ranks(world, resident_bytes, stage, bf16):
        for name, size in bytes_per_param.items():
            assert reported[name] == PARAMS * size, name
        buffers = reported["slots"] + reported["grad_slots"] + reported["staging"]
        assert buffers <= (0 if world == 1 else 10 * LARGEST_UNIT * 4)
        # Not reported: scalars, namely step counts and the placeholders of detached weights.
        assert sum(reported.values()) <= live <= sum(reported.values()) + 4096

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
    rank: int, world: int, stage: int, micro_steps: int, section: dict[str, Any], bucket: int
) -> tuple[Traffic, int]:
    """Traffic of the second step by collective, and bytes of gradient buffers."""
    document = config(stage, False, micro_steps, **section)
    document["zero_optimization"]["reduce_bucket_size"] = bucket
    engine, *_ = rayzero.initialize(model=LinearStack(), config=document)
    train_step(engine, micro_steps)
    before = engine.metrics.collectives
    train_step(engine, micro_steps)
    after = engine.metrics.collectives
    traffic = {
        name: {key: value - before.get(name, {}).get(key, 0) for key, value in counts.items()}
        for name, counts in after.items()
        if counts != before.get(name)
    }
    return traffic, engine.metrics.bytes["grad_slots"]


VOTE = {"calls": 1, "bytes": 80}  # norm, loss, seven step requests, a count of ranks
PARAM_BYTES = PARAMS * 4
BUCKET, HALF_UNIT = 2 * LARGEST_UNIT, LARGEST_UNIT // 2
ONCE = {"reduce_each_micro_step": False}
BLOCKS, ROOT = 6, 1


@pytest.mark.parametrize(
    ("world", "stage", "micro_steps", "section", "bucket", "calls", "sent"),
    [  # calls of the gradients' collective, and how many times the parameters it sends
        (2, 0, 1, {}, BUCKET, 2, 2),
        (4, 0, 1, {}, BUCKET, 2, 2),
        (2, 0, 3, {}, BUCKET, 2, 2),
        (2, 1, 1, {}, BUCKET, 2, 1),
        (2, 1, 3, {}, BUCKET, 2, 1),
        (2, 2, 1, {}, BUCKET, 2, 1),
        (2, 2, 3, {}, BUCKET, 6, 3),  # in every micro-step
        (2, 2, 3, ONCE, BUCKET, 2, 1),
        (2, 3, 1, {}, BUCKET, BLOCKS + ROOT, 1),
        (2, 3, 3, ONCE, BUCKET, BLOCKS + ROOT, 1),
        (2, 3, 1, {}, HALF_UNIT, BLOCKS + 2, 1),  # a block is one part, the head is two
    ],
)
def test_traffic_of_a_step(
    world: int,
    stage: int,
    micro_steps: int,
    section: dict[str, Any],
    bucket: int,
    calls: int,
    sent: int,
) -> None:
    for traffic, grad_bytes in run_ranks(world, step_traffic, stage, micro_steps, section, bucket):
        reduction = "all_reduce" if stage == 0 else "reduce_scatter"
        assert traffic.pop("vote") == VOTE
        assert traffic.pop(reduction) == {"calls": calls, "bytes": sent * PARAM_BYTES}
        if stage in (1, 2):
            assert traffic.pop("all_gather") == {"calls": 2, "bytes": PARAM_BYTES}
        elif stage == 3:
            gathers = traffic.pop("all_gather")
            # Forward gathers all units; in backward the root and the last two blocks are resident.
            most = micro_steps * (BLOCKS + ROOT + BLOCKS - 2)
            assert gathers["calls"] <= most if micro_steps > 1 else gathers["calls"] == most
            assert gathers["bytes"] <= 2 * micro_steps * PARAM_BYTES
        assert traffic == {}
        assert bucket == BUCKET or grad_bytes <= 3 * 4 * HALF_UNIT


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


@pytest.mark.parametrize(
    ("world", "stage", "bf16"),
    [
        *((2, stage, bf16) for stage in range(4) for bf16 in (False, True)),
        *((world, stage, stage % 2 == 0) for world in (1, 4) for stage in range(4)),
    ],
)
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

"""What a step may cost beside the model: seen in what is called and allocated, not in seconds."""

from __future__ import annotations

import sys
from statistics import median
from time import perf_counter
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import rayzero
from tests.support.ranks import run_ranks

LAYERS = 200


def tiny_steps(rank: int, world: int, stage: int) -> set[str]:
    """Functions of torch.distributed called in the second and third of three steps."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(LAYERS)))
    engine, *_ = rayzero.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
        },
    )
    called: set[str] = set()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "/torch/distributed/" in frame.f_code.co_filename:
            called.add(frame.f_code.co_name)
        elif event == "c_call" and "c10d" in (getattr(argument, "__module__", None) or ""):
            called.add(argument.__name__)

    for step in range(3):
        sys.setprofile(watch if step else None)
        engine.backward(engine(torch.ones(2, 2)).sum())
        engine.step()
    sys.setprofile(None)
    return called


@pytest.mark.parametrize("world", [0, 1], ids=["no group", "a group of one"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_alone_a_step_does_not_touch_torch_distributed(stage: int, world: int) -> None:
    assert run_ranks(world, tiny_steps, stage) == [set()]


def test_that_would_be_seen() -> None:
    assert {"all_reduce", "isend", "irecv"} <= run_ranks(2, tiny_steps, 0)[0]


BLOCKS, WIDTH = 6, 64
PARAM_BYTES = WIDTH * WIDTH * 4  # a block has four of these: a unit is four times as long


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Four() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Four(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.d(self.c(self.b(self.a(x)))))


def allocations(rank: int, world: int, stage: int, micro_steps: int) -> list[int]:
    """Bytes of every allocation of torch's in one step, after three to warm up."""
    engine, *_ = rayzero.initialize(
        model=Deep(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": micro_steps,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 4 * WIDTH * WIDTH},
        },
    )
    x = torch.ones(2, WIDTH)

    def step() -> None:
        for _ in range(micro_steps):
            engine.backward(engine(x))
            engine.step()

    for _ in range(3):
        step()
    backend, made = engine._runtime.collectives._backend, []
    zeros = backend.zeros  # shared memory is not torch's to count
    backend.zeros = lambda *size: made.append(size) or zeros(*size)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    assert not made
    events = profiled.profiler.kineto_results.events()
    return [one.nbytes() for one in events if one.name() == "[memory]" and one.nbytes() > 0]


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_a_step_allocates_the_gradients_that_autograd_makes_and_nothing_of_a_units_size(
    world: int, stage: int, micro_steps: int
) -> None:
    for sizes in run_ranks(world, allocations, stage, micro_steps):
        assert max(sizes) == PARAM_BYTES  # less than half a unit: no part, shard, slot or copy
        assert sizes.count(PARAM_BYTES) == 4 * BLOCKS * micro_steps
        small = sum(size for size in sizes if size < PARAM_BYTES)
        assert small < 10 * PARAM_BYTES * micro_steps


def plain_and_ours() -> tuple[float, float]:
    """Median seconds of a step of many tiny layers: plain torch's, and ours at stage 3, in turn."""

    def net() -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))

    x, model = torch.randn(4, 8), net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = rayzero.initialize(model=net(), config=config)

    def plain() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def ours() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    seconds: dict[Any, list[float]] = {plain: [], ours: []}
    for turn in range(33):
        for step, found in seconds.items():
            begun_s = perf_counter()
            step()
            if turn >= 3:
                found.append(perf_counter() - begun_s)
    return median(seconds[plain]), median(seconds[ours])


@pytest.mark.slow
@pytest.mark.alone
def test_a_step_of_tiny_layers_costs_at_most_twice_plain_torchs():
    plain_s, ours_s = plain_and_ours()
    assert ours_s <= 2 * plain_s

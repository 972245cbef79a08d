"""Overhead of a step beside the model: calls of torch.distributed, allocations, time."""

from __future__ import annotations

import sys
from statistics import median
from time import perf_counter
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import rayzero
from tests.support.ranks import run_ranks

LAYERS = 200


def distributed_calls(rank: int, world: int, stage: int) -> set[str]:
    """Names of torch.distributed functions called in the second and third of three steps."""
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

    def record_call(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "/torch/distributed/" in frame.f_code.co_filename:
            called.add(frame.f_code.co_name)
        elif event == "c_call" and "c10d" in (getattr(argument, "__module__", None) or ""):
            called.add(argument.__name__)

    for step in range(3):
        sys.setprofile(record_call if step else None)
        engine.backward(engine(torch.ones(2, 2)).sum())
        engine.step()
    sys.setprofile(None)
    return called


@pytest.mark.parametrize("world", [0, 1], ids=["no group", "group of one"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_single_rank_makes_no_distributed_calls(stage: int, world: int) -> None:
    assert run_ranks(world, distributed_calls, stage) == [set()]


def test_distributed_calls_are_detected() -> None:
    assert {"all_reduce", "isend", "irecv"} <= run_ranks(2, distributed_calls, 0)[0]


BLOCKS, WIDTH = 6, 64
PARAM_BYTES = WIDTH * WIDTH * 4  # a block, which is a unit, has four such parameters


def make_deep_model() -> nn.Module:
    """A block is a unit at any stage."""
    return nn.Sequential(
        *(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)), nn.Tanh())
            for _ in range(BLOCKS)
        )
    )


def allocations(rank: int, world: int, stage: int, micro_steps: int) -> list[int]:
    """Size in bytes of every allocation by torch in one step, after three warm-up steps."""
    engine, *_ = rayzero.initialize(
        model=make_deep_model(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": micro_steps,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 4 * WIDTH * WIDTH},
            "rayzero": {"unshard_modules": ["Sequential"]},
        },
    )
    x = torch.ones(2, WIDTH)

    def step() -> None:
        for _ in range(micro_steps):
            engine.backward(engine(x).square().mean())
            engine.step()

    for _ in range(3):
        step()
    backend, shared_sizes = engine._runtime.collectives._backend, []
    zeros = backend.zeros  # may use shared memory, which the profiler does not count
    backend.zeros = lambda *size: shared_sizes.append(size) or zeros(*size)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert not shared_sizes
    events = profiler.profiler.kineto_results.events()
    memory_events = [event for event in events if event.name() == "[memory]"]
    return [event.nbytes() for event in memory_events if event.nbytes() > 0]


@pytest.mark.parametrize(
    ("world", "stage", "micro_steps"),
    [(2, 0, 1), (3, 0, 2), (3, 1, 1), (2, 1, 2), (2, 2, 1), (3, 2, 2), (3, 3, 1), (2, 3, 2)],
)
def test_step_allocates_only_autograd_gradients(world: int, stage: int, micro_steps: int) -> None:
    for sizes in run_ranks(world, allocations, stage, micro_steps):
        assert max(sizes) == PARAM_BYTES  # a quarter of a unit: so no shard, slot or copy
        assert sizes.count(PARAM_BYTES) == 4 * BLOCKS * micro_steps
        small = sum(size for size in sizes if size < PARAM_BYTES)
        assert small < 10 * PARAM_BYTES * micro_steps


def measure_step_times() -> tuple[float, float]:
    """Median step time of many tiny layers: (plain PyTorch, rayzero at stage 3), interleaved."""

    def make_model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))

    x, model = torch.randn(4, 8), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = rayzero.initialize(model=make_model(), config=config)

    def torch_step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def rayzero_step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    seconds: dict[Any, list[float]] = {torch_step: [], rayzero_step: []}
    for iteration in range(33):
        for step, durations in seconds.items():
            start_s = perf_counter()
            step()
            if iteration >= 3:
                durations.append(perf_counter() - start_s)
    return median(seconds[torch_step]), median(seconds[rayzero_step])


@pytest.mark.slow
@pytest.mark.alone
def test_step_of_tiny_layers_takes_at_most_twice_pytorch():
    torch_s, rayzero_s = measure_step_times()
    assert rayzero_s <= 2 * torch_s

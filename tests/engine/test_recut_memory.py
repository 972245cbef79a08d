"""Memory while an engine is re-cut for other ranks: that of the larger engine and one unit."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock
from weakref import finalize

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rayzero
from rayzero.engine.session import use_session
from tests.engine.generations import Generations, end_together, shared_store
from tests.engine.state.blocks import Block, BlocksSource, StateSession
from tests.support.ranks import run_ranks

WIDTH, BLOCKS = 128, 12
UNIT_NUMEL = WIDTH * WIDTH
SPARE = 1.05


class Stack(nn.Module):
    """Blocks of equal size, which is also a bucket's: each is a unit at any stage."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


class AllocatedBytes(TorchDispatchMode):
    """The bytes of storages, by each operator that makes or frees one."""

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0
        for value in gc.get_objects():  # torch.compile keeps fake ones, of symbolic sizes
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.is_cpu:
                self._add(value)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                self._add(leaf)
        return result


def config(stage: int, bf16: bool) -> dict[str, Any]:
    return {
        "train_batch_size": 12,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": UNIT_NUMEL},
    }


def build(source: Sequence[Block] | None, stage: int, bf16: bool) -> Any:
    with use_session(StateSession(source)):
        return rayzero.initialize(model=Stack(), config=config(stage, bf16))[0]


def train(engine: Any) -> None:
    x = torch.randn(12 // engine.world_size, WIDTH)
    for _ in range(2):
        engine.backward(engine(x))
        engine.step()


def bytes_of_recut(
    rank: int, world: int, stage: int, bf16: bool, sizes: tuple[int, int], keep: bool
) -> tuple[int, int, int] | None:
    """A survivor's bytes: between steps before it, its peak, and between steps after it."""
    generations = Generations(rank, sizes, "own", shared_store(rank))
    with mock.patch.dict(os.environ, {"RAYZERO_SHARED_MEMORY": "0"}):
        survives = generations.form()
        found = None
        with AllocatedBytes() as allocated:
            begin = allocated.now
            if survives:
                engine = build(None, stage, bf16)
                train(engine)
                generations.publish(engine)
                engine.backward(engine(torch.randn(12 // sizes[0], WIDTH)))  # of a lost step
                before = allocated.now - begin
            if generations.form():
                source = generations.blocks()
                if survives:
                    allocated.peak = 0
                    engine.survival.recut(BlocksSource(source), keep=keep)
                    peak = allocated.peak - begin
                else:
                    engine = build(source, stage, bf16)
                train(engine)
                if survives:
                    found = before, peak, allocated.now - begin
        end_together(generations.store, rank, world)
        return found


@pytest.mark.parametrize(("sizes", "bf16", "keep"), [((3, 2), False, True), ((2, 3), True, False)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_peak_is_the_larger_engine_and_a_unit(
    stage: int, sizes: tuple[int, int], bf16: bool, keep: bool
) -> None:
    """And 5 %. A unit: its weights, gradients and Adam's state, not sharded."""
    unit = UNIT_NUMEL * (2 + 4 + 4 + 8 if bf16 else 4 + 4 + 8)
    for before, peak, after in filter(
        None, run_ranks(max(sizes), bytes_of_recut, stage, bf16, sizes, keep)
    ):
        assert peak <= SPARE * max(before, after) + unit, (before, peak, after, unit)

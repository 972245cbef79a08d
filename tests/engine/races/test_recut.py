"""An engine that is re-cut from what it holds, on the device: no race, no memory freed early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rayzero.engine.device import get_device
from rayzero.engine.recut import KeptSource
from tests.engine.state.blocks import Block, BlocksSource
from tests.support.races.cases import Case
from tests.support.races.models import make_batch
from tests.support.races.running import build_engine
from tests.support.virtual_device.memory import Memory
from tests.support.virtual_device.nccl import Ranks
from tests.support.virtual_device.placement import DEVICE
from tests.support.virtual_device.rank import virtual_cluster, virtual_rank

CASES = [
    Case(stage=0, micro_steps=1),
    Case(stage=3, precision="fp32", micro_steps=1),
    Case(stage=2, offload="half", micro_steps=1),
    Case(stage=3, offload="both", micro_steps=1),
    Case(stage=1, micro_steps=1),
]


def recut_engines(case: Case) -> tuple[list[Memory], list[KeptSource]]:
    """Two ranks train, end within a step, are re-cut from what they hold, and train on."""
    ranks = Ranks(2)
    blocks: list[Any] = [None, None]
    memories: list[Any] = [None, None]
    sources: list[Any] = [None, None]

    def train(engine: Any, generator: torch.Generator, *, update: bool = True) -> None:
        batch = make_batch(case.model, generator).pin_memory().to(DEVICE, non_blocking=True)
        engine.backward(engine(batch))
        if update:
            engine.step()

    def run(rank: int) -> None:
        with virtual_rank() as machine:
            memories[rank] = machine.memory
            generator = torch.Generator().manual_seed(rank)
            engine = build_engine(case)
            train(engine, generator)
            blocks[rank] = Block.of(engine)
            train(engine, generator, update=False)
            get_device(DEVICE).synchronize()  # as where a generation ends
            ranks.barrier()
            sources[rank] = engine.survival.recut(BlocksSource(blocks), keep=True)
            train(engine, generator)
            get_device(DEVICE).synchronize()
            engine.close()

    with virtual_cluster(ranks):
        ranks.run(run)
    return memories, sources


@pytest.mark.parametrize("case", CASES, ids=str)
def test_re_cut_does_not_race(case: Case):
    memories, sources = recut_engines(case)
    for memory, source in zip(memories, sources, strict=True):
        assert source.bytes_moved > 0
        assert source.bytes_copied > 0
        assert not memory.races
        assert not memory.early_frees


def test_copies_beside_the_compute_stream_are_noticed(monkeypatch: pytest.MonkeyPatch):
    held = KeptSource.tensor

    def on_another_stream(self: KeptSource, *where: int) -> Tensor | None:
        device = get_device(DEVICE)
        tensor = held(self, *where)
        if tensor is None:
            return None
        with device.use_stream(device.new_stream()):
            return tensor.clone()

    monkeypatch.setattr(KeptSource, "tensor", on_another_stream)
    memories, _ = recut_engines(CASES[1])
    assert all(memory.races for memory in memories)

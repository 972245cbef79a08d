"""State that a process keeps when its engine is replaced. The oracle is a plain torch loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rayzero
from rayzero.engine.api.tensor_fragments import safe_set_full_optimizer_state
from rayzero.engine.engine import Engine
from rayzero.engine.offload import plan
from rayzero.engine.offload.transfer import HostTransfer
from rayzero.engine.session import use_session
from rayzero.engine.state.kept import KeptSource
from rayzero.engine.state.load import LOAD_ALL
from rayzero.engine.state.ranges import StateRange
from tests.engine.state.blocks import Block, BlocksSource, StateSession
from tests.support.ranks import run_ranks
from tests.workers.recovery_jobs import Data, engine_config, make_model, oracle

SEED, AT, STEPS = 3, 3, 6
CPU = {"offload_optimizer": {"device": "cpu"}}
PARAM = {"offload_param": {"device": "cpu"}}
BF16 = {"bf16": {"enabled": True}}


@dataclass
class KeepingSession(StateSession):
    """Resumes from what the last engine held, and from blocks."""

    kept: list[StateRange] = field(default_factory=list)
    reads: KeptSource | None = None

    @contextmanager
    def resume_from(self) -> Iterator[Any]:
        assert self.blocks is not None
        self.source = BlocksSource(self.blocks)
        self.reads = KeptSource(self.kept, self.source)
        yield self.reads
        self.reads.close()


def build(session: StateSession, config: dict[str, Any]) -> tuple[Engine, Any]:
    with use_session(session):
        engine, _, loader, _ = rayzero.initialize(
            model=make_model(torch.float64), training_data=Data(), config=config
        )
    return engine, loader


def train(engine: Engine, loader: Any, end: int) -> None:
    for x, y in loader.steps(end - engine.progress.step):
        engine.backward(nn.functional.mse_loss(engine(x).double(), y))
        engine.step()


def replace_engine(
    rank: int, world: int, config: dict[str, Any], separate: bool, newcomer: int | None
) -> tuple[dict[str, Tensor], tuple[int, int, int], int]:
    """Trains, replaces the engine in the middle of a step, and trains on; all but `newcomer` keep
    their state. Returns the weights, the bytes moved, copied, and read, and those that were read
    from blocks."""
    original = plan.make_transfer
    if separate:
        plan.make_transfer = lambda device: HostTransfer(separate_memory=True)
    try:
        engine, loader = build(StateSession(seed=SEED), config)
        train(engine, loader, AT)
        blocks: list[Any] = [None] * world
        dist.all_gather_object(blocks, Block.of(engine))
        x, y = next(iter(loader))  # aborted before its update
        engine.backward(nn.functional.mse_loss(engine(x).double(), y))
        kept = engine.state.private_ranges()
        assert engine.state.consistent
        assert engine.progress.step == AT
        for param in engine.module.parameters():  # a script that swaps weights
            if config["zero_optimization"]["stage"] < 3:
                param.data.zero_()
        engine.close()
        session = KeepingSession(blocks, seed=SEED, kept=kept if rank != newcomer else [])
        engine, loader = build(session, config)
        train(engine, loader, STEPS)
        weights = engine.state_dict()
    finally:
        plan.make_transfer = original
    reads, source = session.reads, session.source
    assert reads is not None
    assert source is not None
    assert not reads.block_indexes[0].ranges or rank != newcomer
    return weights, (reads.bytes_moved, reads.bytes_copied, reads.bytes_read), source.bytes_read


CASES = [
    *((stage, {}, {}, False) for stage in (0, 1, 2, 3)),
    (1, CPU, {}, True),
    (3, CPU | PARAM, {}, True),
    (2, {}, BF16, False),
]


@pytest.mark.parametrize(("stage", "offload", "precision", "separate"), CASES)
def test_survivors_read_only_what_the_script_may_have_written(
    stage: int, offload: dict[str, Any], precision: dict[str, Any], separate: bool
):
    config = engine_config(stage) | precision
    config["zero_optimization"] |= offload
    results = run_ranks(2, replace_engine, config, separate, 1)
    weights, (moved, copied, read), from_blocks = results[0]
    weights_are_apart = stage == 3 or separate or bool(precision)
    assert read == from_blocks
    assert (read == 0) == (copied > 0) == weights_are_apart
    assert moved >= 2 * (copied + read), "both moments, with padding"
    _, (moved_new, copied_new, read_new), _ = results[1]
    assert (moved_new, copied_new) == (0, 0)
    assert read_new > copied + read
    if not precision:
        for name, expected in oracle(STEPS).items():
            assert torch.allclose(weights[name], expected, rtol=1e-9, atol=1e-12), name


def test_kept_state_is_the_blocks_bit_by_bit():
    """In bf16, where weights and the state have different dtypes, with residuals and offload."""
    config = engine_config(2) | BF16 | {"rayzero": {"compression": {"gradients": "sign"}}}
    with_kept = run_ranks(2, replace_engine, config, False, None)
    without = run_ranks(2, _replace_without_keeping, config)
    for name, value in without[0].items():
        assert torch.equal(with_kept[0][0][name], value), name
    assert with_kept[0][1][2] > 0, "residuals are read: a backward has changed them"


def _replace_without_keeping(rank: int, world: int, config: dict[str, Any]) -> dict[str, Tensor]:
    return replace_engine(rank, world, config, False, rank)[0]


def load_resharded(
    rank: int, world: int, blocks: list[Block], config: dict[str, Any]
) -> tuple[tuple[int, int, int], int, dict[str, Tensor]]:
    """Loads the state of other ranks, keeping half of what one of them held as this rank."""
    held = _as_ranges(blocks[rank])
    session = KeepingSession(blocks, seed=SEED, kept=held)
    engine, loader = build(session, config)
    train(engine, loader, STEPS)
    weights, reads, source = engine.state_dict(), session.reads, session.source
    assert reads is not None
    assert source is not None
    return (reads.bytes_moved, reads.bytes_copied, reads.bytes_read), source.bytes_read, weights


def _as_ranges(block: Block) -> list[StateRange]:
    """The ranges of a block, each in a tensor of its own."""
    parts = []
    for one in block.index.ranges:
        count = one.stop - one.start
        memory = torch.frombuffer(block.data, dtype=torch.float64, count=count, offset=one.offset)
        logical = block.index.tensors[one.name]
        held = type(one)(one.name, one.start, one.stop, 0)
        parts.append(StateRange(memory.clone(), (held,), {one.name: logical.shape}))
    return parts


def make_blocks(rank: int, world: int, config: dict[str, Any]) -> Block:
    engine, loader = build(StateSession(seed=SEED), config)
    train(engine, loader, AT)
    return Block.of(engine)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_ranges_that_stay_on_a_rank_are_copied_after_a_resize(before: int, after: int):
    config = engine_config(3)
    blocks = run_ranks(before, make_blocks, config)
    # A newcomer holds nothing: an empty block.
    results = run_ranks(after, load_resharded, [*blocks, _empty(blocks[0])], config)
    for rank, ((moved, copied, read), from_blocks, _) in enumerate(results):
        assert from_blocks == read
        assert (moved + copied > 0) == (rank < before)
        assert (read > 0) == (rank > 0 or after < before), (
            "a smaller shard 0 is part of the old one"
        )
    for name, expected in oracle(STEPS).items():
        assert torch.allclose(results[0][2][name], expected, rtol=1e-9, atol=1e-12), name


def _empty(like: Block) -> Block:
    return Block(type(like.index)(), bytearray(), like.metadata)


def held_names(rank: int, world: int, stage: int) -> set[str]:
    model = make_model(torch.float64)
    model[2].requires_grad_(False)
    with use_session(StateSession(seed=SEED)):
        engine, _, loader, _ = rayzero.initialize(
            model=model, training_data=Data(), config=engine_config(stage)
        )
    train(engine, loader, 1)
    return {one.name for part in engine.state.private_ranges() for one in part.ranges}


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_weights_are_kept_where_the_script_does_not_see_them(stage: int):
    names = set[str]().union(*run_ranks(2, held_names, stage))
    assert "optimizer.exp_avg/4.bias" in names
    assert ("weights/0.weight" in names) == (stage == 3)
    assert ("weights/2.weight" in names) == (stage == 3)


def changed_by_script(rank: int, world: int) -> list[bool]:
    engine, loader = build(StateSession(seed=SEED), engine_config(3))
    train(engine, loader, 1)
    seen = [engine.state.altered]
    param = next(engine.module.parameters())
    safe_set_full_optimizer_state(param, torch.zeros_like(param), "exp_avg")
    seen.append(engine.state.altered)
    train(engine, loader, 2)
    seen.append(engine.state.altered)
    engine.state.load_from(BlocksSource([Block.of(engine)]), LOAD_ALL)
    return [*seen, engine.state.altered]


def test_state_that_the_script_has_changed_is_known():
    assert run_ranks(1, changed_by_script)[0] == [False, True, False, True]

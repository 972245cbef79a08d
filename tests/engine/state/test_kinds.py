"""Every kind of state survives a change of world size and stage, and a checkpoint.

`tests/engine/test_recut.py` tests engines that keep them where ranks change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.engine.session import use_session
from tests.engine import zoo
from tests.engine.state.blocks import Block, StateSession
from tests.engine.state.kinds import (
    KINDS,
    SEED,
    assert_states_equal,
    check_parts,
    make_engine,
    merge_blocks,
    train_until,
)
from tests.support.ranks import run_ranks

WORLD, NEW_WORLD, SAVE_STEP, END_STEP = 2, 3, 5, 7


def train_uninterrupted(
    rank: int, world: int, name: str, folder: str
) -> tuple[Block, Block, dict[str, int]]:
    """Returns the states at `SAVE_STEP`, which is also saved, and at `END_STEP`, and the bytes."""
    kind = KINDS[name]
    with use_session(StateSession(seed=SEED)):
        engine, loader = make_engine(kind, kind.config(kind.stage, folder))
        train_until(engine, loader, SAVE_STEP)
        first = Block.of(engine)
        engine.save_checkpoint(folder, "saved")
        train_until(engine, loader, END_STEP)
    result = first, Block.of(engine), engine.metrics.bytes
    engine.close()
    return result


def train_resharded(
    rank: int, world: int, name: str, folder: str, blocks: list[Block]
) -> tuple[Block, Block]:
    """Returns the resharded state, and the state at `END_STEP`."""
    kind = KINDS[name]
    with use_session(StateSession(blocks, seed=SEED)):
        engine, loader = make_engine(kind, kind.config(kind.target_stage, folder))
        first = Block.of(engine)
        train_until(engine, loader, END_STEP)
    result = first, Block.of(engine)
    engine.close()
    return result


def load(rank: int, world: int, name: str, folder: str) -> Block:
    kind = KINDS[name]
    engine, _ = make_engine(kind, kind.config(kind.target_stage, folder))
    engine.load_checkpoint(folder, "saved")
    block = Block.of(engine)
    engine.close()
    return block


@pytest.mark.parametrize("name", KINDS)
def test_state_survives_reshard_and_checkpoint(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    results = run_ranks(WORLD, train_uninterrupted, name, str(tmp_path))
    blocks = [result[0] for result in results]
    expected, expected_end = merge_blocks(blocks), merge_blocks([r[1] for r in results])
    check_parts(kind, blocks)
    if "zero_hpz_partition_size" in kind.zero:
        assert results[0][2]["second_shards"] > 0
    resharded = run_ranks(NEW_WORLD, train_resharded, name, str(tmp_path), blocks)
    actual, end = merge_blocks([r[0] for r in resharded]), merge_blocks([r[1] for r in resharded])
    assert_states_equal(actual, expected, exact_residuals=False)
    assert end.metadata["step"] == expected_end.metadata["step"] == END_STEP
    assert end.metadata["loss_scale"] == expected_end.metadata["loss_scale"]
    for key, value in expected_end.tensors.items():
        if kind.limit is not None and key.startswith("weights/"):
            assert zoo.relative_l2_error(end.tensors[key], value) < kind.limit, key
    loaded = merge_blocks(run_ranks(1, load, name, str(tmp_path)))
    assert_states_equal(loaded, expected, exact_residuals=False)

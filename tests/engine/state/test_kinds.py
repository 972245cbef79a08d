"""Every kind of state through a change of world and stage, and through a checkpoint.

Repair and replicas of the same rows are in `tests/workers/test_recovery_of_state_kinds.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.engine.session import use_session
from tests.engine import zoo
from tests.engine.state.blocks import Block, StateSession
from tests.engine.state.kinds import FOUND, KINDS, SEED, equal, go_on, make, whole
from tests.support.ranks import run_ranks

WORLD, OTHER, AT, END = 2, 3, 5, 7


def uninterrupted(
    rank: int, world: int, name: str, folder: str
) -> tuple[Block, Block, dict[str, int]]:
    """The states at `AT`, which is also saved, and at `END`; bytes by class."""
    kind = KINDS[name]
    with use_session(StateSession(seed=SEED)):
        engine, loader = make(kind, kind.config(kind.stage, folder))
        go_on(engine, loader, AT)
        first = Block.of(engine)
        engine.save_checkpoint(folder, "saved")
        go_on(engine, loader, END)
    found = first, Block.of(engine), engine.metrics.bytes
    engine.close()
    return found


def resharded(
    rank: int, world: int, name: str, folder: str, blocks: list[Block]
) -> tuple[Block, Block]:
    """The state as another world has it, and after its next steps."""
    kind = KINDS[name]
    with use_session(StateSession(blocks, seed=SEED)):
        engine, loader = make(kind, kind.config(kind.then, folder))
        first = Block.of(engine)
        go_on(engine, loader, END)
    found = first, Block.of(engine)
    engine.close()
    return found


def loaded(rank: int, world: int, name: str, folder: str) -> Block:
    kind = KINDS[name]
    engine, _ = make(kind, kind.config(kind.then, folder))
    engine.load_checkpoint(folder, "saved")
    block = Block.of(engine)
    engine.close()
    return block


@pytest.mark.parametrize("name", KINDS)
def test_survives_a_reshard_and_a_checkpoint(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    results = run_ranks(WORLD, uninterrupted, name, str(tmp_path))
    blocks, ends = [one[0] for one in results], [one[1] for one in results]
    right = whole(blocks)
    for key in kind.holds:
        assert FOUND[key](blocks, right), key
    if "zero_hpz_partition_size" in kind.zero:
        assert results[0][2]["second_shards"] > 0
    others = run_ranks(OTHER, resharded, name, str(tmp_path), blocks)
    equal(whole([one[0] for one in others]), right, bits=False)
    last, undisturbed_last = whole([one[1] for one in others]), whole(ends)
    assert last.small["step"] == undisturbed_last.small["step"] == END
    assert last.small["loss_scale"] == undisturbed_last.small["loss_scale"]
    for key, value in undisturbed_last.tensors.items():
        if kind.limit is not None and key.startswith("weights/"):
            assert zoo.relative_l2_error(last.tensors[key], value) < kind.limit, key
    equal(whole(run_ranks(1, loaded, name, str(tmp_path))), right, bits=False)

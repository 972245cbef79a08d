"""The stage table equals that of the ZeRO paper; collectives of each stage."""

from __future__ import annotations

import pytest

from rayzero.engine.zero.placement import STAGES, Collective, Placement, Stage

R, P, S = Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED


def test_stages_shard_progressively_more() -> None:
    """P_os, P_os+g and P_os+g+p of the paper, after plain data parallelism."""
    rows = [(row.number, row.model_weights, row.main_grads, row.optimizer_state) for row in STAGES]
    assert rows == [(0, R, P, R), (1, R, P, S), (2, R, S, S), (3, S, S, S)]


def test_collectives_by_stage() -> None:
    collectives = [(row.gradient_collective, row.weight_collective) for row in STAGES]
    scatter, gather = Collective.REDUCE_SCATTER, Collective.ALL_GATHER
    none = Collective.NONE
    assert collectives == [
        (Collective.ALL_REDUCE, none),
        (scatter, gather),
        (scatter, gather),
        (scatter, none),  # weights stay sharded: gathered when used, not when updated
    ]


@pytest.mark.parametrize("row", STAGES, ids=lambda row: str(row.number))
def test_single_rank_shards_nothing(row: Stage) -> None:
    single = row.for_world_size(1)
    assert single == Stage(row.number, R, P, R)
    assert single.weight_collective is Collective.NONE
    assert row.for_world_size(2) is row

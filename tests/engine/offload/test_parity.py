"""Offloaded training equals training without offload; that one is held against plain torch."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.engine import zoo
from tests.engine.offload.training import config, memory_apart, train
from tests.support.covering import covering
from tests.support.ranks import run_ranks

CPU = {"offload_optimizer": {"device": "cpu"}}
PARAM = {"offload_param": {"device": "cpu"}}


def nvme(folder: Path) -> dict[str, Any]:
    """Pieces of 64 elements, so that units are cut."""
    place = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 3}
    return {"offload_optimizer": place, "sub_group_size": 64}


def ways(stage: int, folder: Path) -> dict[str, dict[str, Any]]:
    half = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    found = {"cpu": CPU, "half": half, "nvme": nvme(folder)}
    if stage == 3:
        found |= {"param": PARAM, "both": CPU | PARAM, "nvme and param": nvme(folder) | PARAM}
    return found


def differences(
    rank: int, world: int, stage: int, precision: str, micro_steps: int, apart: bool, folder: Path
) -> dict[str, float]:
    """Of each way to offload: the largest relative difference to none; 0 for equal bits."""
    losses, right = train(config(stage, precision, micro_steps))
    found = {}
    for name, offload in ways(stage, folder).items():
        with memory_apart() if apart else nullcontext():
            seen, state = train(config(stage, precision, micro_steps, **offload))
        same = [abs(one - other) for one, other in zip(seen, losses, strict=True)]
        weights = [zoo.relative(state[key], right[key]) for key in right]
        found[name] = max(same + weights)
    return found


AXES = {
    "world": (1, 2, 3),
    "stage": (0, 1, 2, 3),
    "precision": ("fp32", "bf16"),
    "apart": (False, True),  # memory, as `memory_apart` makes it
}


@pytest.mark.parametrize(
    tuple(AXES), [tuple(row[name] for name in AXES) for row in covering(AXES, 2)]
)
def test_bits_are_those_without_offload(
    world: int, stage: int, precision: str, apart: bool, tmp_path: Path
) -> None:
    # One rank that offloads at stage 3 has blocks, where without it has buckets: the gradient norm,
    # by which gradients are clipped, is added up in another order.
    limit = {"fp32": 1e-5, "bf16": 2e-2}[precision] if (world, stage, apart) == (1, 3, True) else 0
    for found in run_ranks(world, differences, stage, precision, 1, apart, tmp_path):
        assert found.keys() == ways(stage, tmp_path).keys()
        assert max(found.values()) <= limit, found
    assert not list(tmp_path.iterdir())  # files have no names


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_accumulated_sums_differ_by_the_order_of_adding_only(
    world: int, stage: int, tmp_path: Path
) -> None:
    """Without offload a rank's terms are added one by one to what it has; here their sum is."""
    for found in run_ranks(world, differences, stage, "bf16", 3, True, tmp_path):
        assert max(found.values()) <= 2e-2
    for found in run_ranks(world, differences, stage, "fp32", 3, True, tmp_path):
        assert max(found.values()) <= 1e-4

"""Offloaded training equals training without; other tests compare that with plain torch."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.engine import zoo
from tests.engine.offload.training import config, separate_host_memory, train
from tests.support.covering import covering
from tests.support.ranks import run_ranks

CPU = {"offload_optimizer": {"device": "cpu"}}
PARAM = {"offload_param": {"device": "cpu"}}


def nvme(folder: Path) -> dict[str, Any]:
    """Chunks of 64 elements, so that units are divided."""
    place = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 3}
    return {"offload_optimizer": place, "sub_group_size": 64}


def offload_configs(stage: int, folder: Path) -> dict[str, dict[str, Any]]:
    half = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    result = {"cpu": CPU, "half": half, "nvme": nvme(folder)}
    if stage == 3:
        result |= {"param": PARAM, "both": CPU | PARAM, "nvme and param": nvme(folder) | PARAM}
    return result


def differences(
    rank: int, world: int, stage: int, precision: str, micro_steps: int, apart: bool, folder: Path
) -> dict[str, float]:
    """The largest relative difference to training without offload; 0: same bits."""
    losses, expected = train(config(stage, precision, micro_steps))
    result = {}
    for name, offload in offload_configs(stage, folder).items():
        with separate_host_memory() if apart else nullcontext():
            seen, state = train(config(stage, precision, micro_steps, **offload))
        same = [abs(one - other) for one, other in zip(seen, losses, strict=True)]
        weights = [zoo.relative_error(state[key], expected[key]) for key in expected]
        result[name] = max(same + weights)
    return result


AXES = {
    "world": (1, 2, 3),
    "stage": (0, 1, 2, 3),
    "precision": ("fp32", "bf16"),
    "apart": (False, True),  # host memory is separate
}


@pytest.mark.parametrize(
    tuple(AXES), [tuple(row[name] for name in AXES) for row in covering(AXES, 2)]
)
def test_same_bits_as_without_offload(
    world: int, stage: int, precision: str, apart: bool, tmp_path: Path
) -> None:
    # One rank at stage 3 has blocks with offload and buckets without, so the gradient norm is
    # summed in another order.
    limit = {"fp32": 1e-5, "bf16": 2e-2}[precision] if (world, stage, apart) == (1, 3, True) else 0
    for result in run_ranks(world, differences, stage, precision, 1, apart, tmp_path):
        assert result.keys() == offload_configs(stage, tmp_path).keys()
        assert max(result.values()) <= limit, result
    assert not list(tmp_path.iterdir())  # the file has no name


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_accumulated_sums_differ_by_rounding_only(world: int, stage: int, tmp_path: Path) -> None:
    """Without offload the ranks' terms are added to the shard one by one, with offload at once."""
    for result in run_ranks(world, differences, stage, "bf16", 3, True, tmp_path):
        assert max(result.values()) <= 2e-2
    for result in run_ranks(world, differences, stage, "fp32", 3, True, tmp_path):
        assert max(result.values()) <= 1e-4

"""Training with offload equals training without; the latter is compared with PyTorch elsewhere."""

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
        files = {"offload_param": {"device": "nvme", "nvme_path": str(folder)}}
        result |= {"param files": files, "both in files": nvme(folder) | files}
    return result


def max_errors(
    rank: int,
    world: int,
    stage: int,
    precision: str,
    micro_steps: int,
    separate_memory: bool,
    folder: Path,
) -> dict[str, float]:
    """Largest relative error against training without offload; 0 if bit-identical."""
    losses, expected = train(config(stage, precision, micro_steps))
    result = {}
    for name, offload in offload_configs(stage, folder).items():
        with separate_host_memory() if separate_memory else nullcontext():
            actual, state = train(config(stage, precision, micro_steps, **offload))
        loss_errors = [abs(a - b) for a, b in zip(actual, losses, strict=True)]
        weights = [zoo.relative_error(state[key], expected[key]) for key in expected]
        result[name] = max(loss_errors + weights)
    return result


AXES = {
    "world": (1, 2, 3),
    "stage": (0, 1, 2, 3),
    "precision": ("fp32", "bf16"),
    "separate_memory": (False, True),  # host memory is separate
}


@pytest.mark.parametrize(
    tuple(AXES), [tuple(row[name] for name in AXES) for row in covering(AXES, 2)]
)
def test_offload_is_bit_identical(
    world: int, stage: int, precision: str, separate_memory: bool, tmp_path: Path
) -> None:
    # One rank at stage 3 has blocks with offload and buckets without, so the gradient norm is
    # summed in another order.
    limit = (
        {"fp32": 1e-5, "bf16": 2e-2}[precision]
        if (world, stage, separate_memory) == (1, 3, True)
        else 0
    )
    for result in run_ranks(world, max_errors, stage, precision, 1, separate_memory, tmp_path):
        assert result.keys() == offload_configs(stage, tmp_path).keys()
        assert max(result.values()) <= limit, result
    assert not list(tmp_path.iterdir())  # the file is unlinked


@pytest.mark.parametrize(
    ("world", "stage", "precision", "limit"),
    [(1, 1, "bf16", 2e-2), (1, 3, "fp32", 1e-4), (2, 1, "fp32", 1e-4), (2, 3, "bf16", 2e-2)],
)
def test_accumulation_only_differs_by_rounding(
    world: int, stage: int, precision: str, limit: float, tmp_path: Path
) -> None:
    """Offload adds the gradients of all ranks to the shard at once, not rank by rank."""
    for result in run_ranks(world, max_errors, stage, precision, 3, True, tmp_path):
        assert max(result.values()) <= limit

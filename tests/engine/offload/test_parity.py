"""Training with offload equals training without, to the bit.

The matrix (`tests/engine/matrix`) compares both with PyTorch, in more combinations, which bf16 lets
it do to some rounding only.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.engine import zoo
from tests.engine.offload.training import config, offload_configs, separate_host_memory, train
from tests.support.ranks import run_ranks


def max_errors(
    rank: int, world: int, stage: int, precision: str, separate_memory: bool, folder: Path
) -> dict[str, float]:
    """Largest relative error against training without offload; 0 if bit-identical."""
    losses, expected = train(config(stage, precision))
    result = {}
    for name, offload in offload_configs(folder, stage).items():
        with separate_host_memory() if separate_memory else nullcontext():
            actual, state = train(config(stage, precision, **offload))
        loss_errors = [abs(a - b) for a, b in zip(actual, losses, strict=True)]
        weights = [zoo.relative_error(state[key], expected[key]) for key in expected]
        result[name] = max(loss_errors + weights)
    return result


@pytest.mark.parametrize(
    ("world", "stage", "precision", "separate_memory"),
    [
        (1, 0, "bf16", True),
        (2, 1, "fp32", True),
        (3, 2, "bf16", True),
        (2, 3, "bf16", True),
        (2, 3, "fp32", False),
    ],
)
def test_offload_is_bit_identical(
    world: int, stage: int, precision: str, separate_memory: bool, tmp_path: Path
) -> None:
    for result in run_ranks(world, max_errors, stage, precision, separate_memory, tmp_path):
        assert result == dict.fromkeys(offload_configs(tmp_path, stage), 0), result
    assert not list(tmp_path.iterdir())  # the file is unlinked

"""Offload x stages x precisions x accumulation x clipping x overlap, on one to three ranks."""

from __future__ import annotations

from itertools import product

import pytest

from tests.engine.matrix.cells import CLIP, OFFLOADS, Cell
from tests.engine.matrix.test_matrix import check

WAYS = [
    (stage, offload)
    for stage, offload in product(range(4), OFFLOADS)
    if offload and (stage == 3 or offload in ("cpu", "half", "nvme"))
]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_sgd_over_offloads(world: int, precision: str) -> None:
    check(
        [
            Cell(stage, precision, micro_steps, clip, "sgd", overlap, 150, offload, apart)
            for (stage, offload), micro_steps, (clip, overlap), apart in product(
                WAYS, (1, 4), ((0.0, True), (CLIP, False)), (False, True)
            )
        ],
        world,
    )


@pytest.mark.parametrize("precision", ["fp64", "fp16"])
@pytest.mark.parametrize("world", [1, 2])
def test_adamw_over_offloads(world: int, precision: str) -> None:
    check(
        [
            Cell(stage, precision, 2, CLIP, "adamw", offload=offload, apart=True)
            for stage, offload in WAYS
        ],
        world,
    )

"""What a config chooses, all axes together, against plain torch, on one to three ranks.

Every three choices of different axes meet in some cell (`test_every_three_choices_meet`); other
shapes and configs are drawn by hypothesis.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine import zoo
from tests.engine.matrix.cells import CLIP, DTYPES, OFFLOADS, Cell, oracle_of, train
from tests.support.covering import covering
from tests.support.ranks import run_ranks

# (largest difference of a loss, relative; of a weight, relative: its L2 norm in 16 bits, where the
# rounding of single weights flips)
TOLERANCES = {
    ("fp64", "sgd"): (1e-9, 1e-9),
    ("fp64", "adamw"): (1e-9, 1e-9),
    ("fp32", "sgd"): (1e-5, 1e-5),
    ("fp32", "adamw"): (1e-4, 1e-3),
    ("bf16", "sgd"): (1e-2, 3e-3),
    ("bf16", "adamw"): (1e-2, 3e-3),
    ("fp16", "sgd"): (1e-3, 1e-3),
    ("fp16", "adamw"): (1e-3, 1e-3),
}


AXES: dict[str, tuple[Any, ...]] = {
    "world": (1, 2, 3),
    "stage": (0, 1, 2, 3),
    "precision": tuple(DTYPES),
    "micro_steps": (1, 4),
    "clip": (0.0, CLIP),
    "optimizer": ("sgd", "adamw"),
    "overlap": (True, False),
    "bucket": (150, 10_000),
    "offload": tuple(OFFLOADS),
    "apart": (False, True),
}
AT_STAGE_3 = {"weights", "param", "nvme and param"}  # of offload


def allowed(row: dict[str, Any]) -> bool:
    return row.get("stage", 3) == 3 or row.get("offload") not in AT_STAGE_3


ROWS = covering(AXES, 3, allowed)


def check(
    cells: list[Cell],
    world: int,
    within: tuple[float, float] | None = None,
    within_16_bits: tuple[float, float] | None = None,
) -> None:
    """All cells on so many ranks, within their precision's tolerances, or within those given."""
    results = run_ranks(world, train, cells, timeout_s=300)
    for number, cell in enumerate(cells):
        mixed = cell.precision in ("bf16", "fp16")
        given_here = (within_16_bits if mixed else None) or within
        per_loss, per_weight = given_here or TOLERANCES[cell.precision, cell.optimizer]
        right_losses, right, right_norm = oracle_of(cell, max(world, 1))
        losses, state, norm = results[0][number]
        assert losses == pytest.approx(right_losses, rel=per_loss), cell
        if not cell.clip:  # the oracle tells the norm after clipping
            assert norm == pytest.approx(right_norm, rel=10 * per_loss), cell
        assert all(others[number][0] == losses for others in results), cell
        distance = zoo.relative_l2 if mixed else zoo.relative
        worst = max(distance(state[name], value) for name, value in right.items())
        assert worst <= per_weight, cell
        assert all(state[name].dtype is value.dtype for name, value in right.items()), cell


@pytest.mark.parametrize("stage", AXES["stage"])
@pytest.mark.parametrize("world", AXES["world"])
def test_equals_plain_torch(world: int, stage: int) -> None:
    here = [row for row in ROWS if (row["world"], row["stage"]) == (world, stage)]
    cells = [Cell(**{key: row[key] for key in row if key != "world"}) for row in here]
    check(cells, world)


def test_every_three_choices_meet() -> None:
    met = {frozenset(three) for row in ROWS for three in combinations(row.items(), 3)}
    for names in combinations(AXES, 3):
        for values in product(*(AXES[name] for name in names)):
            row = dict(zip(names, values, strict=True))
            assert allowed(row) == (frozenset(row.items()) in met), row
    assert len(ROWS) < 200  # the whole product has 14,592


@pytest.mark.parametrize("sums", ["bf16", "fp16"])
def test_sums_in_16_bits_stay_near(sums: str) -> None:
    """Gradients are summed, and travel, in 16 bits: near fp32 sums, at every place they rest."""
    near = (("data_types", {"grad_accum_dtype": sums}),)
    axes = product((0, 1, 2, 3), ("", "cpu"))
    check(
        [
            Cell(stage, "fp16", 4, CLIP, "sgd", offload=offload, more=near)
            for stage, offload in axes
        ],
        3,
        within=(2e-2, 2e-2),
    )


cells = st.builds(
    Cell,
    stage=st.integers(0, 3),
    precision=st.sampled_from(["fp64", "fp32", "bf16", "fp16"]),
    micro_steps=st.sampled_from([1, 2, 4]),
    clip=st.sampled_from([0.0, CLIP]),
    optimizer=st.just("sgd"),
    overlap=st.booleans(),
    bucket=st.integers(1, 3000),
    offload=st.sampled_from(["", "cpu", "param"]),
    more=st.sampled_from(
        [(), (("prescale_gradients", True),), (("gradient_predivide_factor", 2),)]
    ),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3)),
).filter(lambda cell: cell.offload != "param" or cell.stage == 3)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 3), st.lists(cells, min_size=1, max_size=4))
def test_any_shape_and_any_config(world: int, drawn: list[Cell]) -> None:
    # A 16-bit weight or two of a tiny model may round the other way.
    check(drawn, world, within_16_bits=(1e-2, 2e-2))


def test_the_tolerances_are_sharp():
    """In 16 bits even the same batch in other parts is told apart, let alone a wrong average."""
    for precision in ("bf16", "fp16"):
        _, right, _ = oracle_of(Cell(0, precision), 1)
        _, other, _ = oracle_of(Cell(0, precision, 4), 1)
        moved = max(zoo.relative_l2(other[name], value) for name, value in right.items())
        assert moved > TOLERANCES[precision, "sgd"][1]
        assert all(value.dtype is DTYPES[precision] for value in right.values())

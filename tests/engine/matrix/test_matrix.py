"""Combinations of settings equal plain PyTorch without a group and on one to three ranks.

The rows are a covering array of strength 3 (`test_rows_cover_all_triples`); hypothesis generates
other shapes and configs.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine import zoo
from tests.engine.matrix.cells import (
    CLIP,
    DTYPES,
    OFFLOADS,
    OPTIMIZERS,
    SAMPLES,
    SHAPE,
    STEPS,
    Cell,
    make_model,
    reference,
    train,
)
from tests.support.covering import covering
from tests.support.ranks import run_ranks

# Largest relative error of (losses, weights). In 16 bits weights are compared by L2 norm, because
# rounding flips single elements.
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
    "world": (0, 1, 2, 3),
    "stage": (0, 1, 2, 3),
    "precision": tuple(DTYPES),
    "micro_steps": (1, 4),
    "clip": (0.0, CLIP),
    "optimizer": ("sgd", "adamw"),
    "overlap": (True, False),
    "bucket": (150, 10_000),
    "offload": tuple(OFFLOADS),
    "separate_memory": (False, True),
    "shape": (SHAPE, None),
}
STAGE_3_OFFLOADS = {"weights", "param", "nvme and param"}


def allowed(row: dict[str, Any]) -> bool:
    return row.get("stage", 3) == 3 or row.get("offload") not in STAGE_3_OFFLOADS


@cache
def rows() -> list[dict[str, Any]]:
    return covering(AXES, 3, allowed)


def check(
    cells: list[Cell],
    world: int,
    tolerances: tuple[float, float] | None = None,
    mixed_tolerances: tuple[float, float] | None = None,
) -> None:
    """Train the cells and compare them with their references.

    Args:
        tolerances: replace `TOLERANCES`.
        mixed_tolerances: replace them for bf16 and fp16.
    """
    results = run_ranks(world, train, cells, timeout_s=300)
    for number, cell in enumerate(cells):
        mixed = cell.precision in ("bf16", "fp16")
        default = tolerances or TOLERANCES[cell.precision, cell.optimizer]
        loss_rel, weight_rel = (mixed_tolerances if mixed else None) or default
        expected_losses, expected, expected_norm = reference(cell, max(world, 1))
        losses, state, norm = results[0][number]
        assert losses == pytest.approx(expected_losses, rel=loss_rel), cell
        if not cell.clip:  # the reference's norm is that after clipping
            assert norm == pytest.approx(expected_norm, rel=10 * loss_rel), cell
        for other, other_state, _ in (by_rank[number] for by_rank in results[1:]):
            assert (other, other_state) == (losses, {}), cell
        assert state["head.weight"] is state["embed.weight"]
        distance = zoo.relative_l2_error if mixed else zoo.relative_error
        error = max(distance(state[name], value) for name, value in expected.items())
        assert error <= weight_rel, cell
        for name, value in expected.items():  # buffers keep their dtype
            kept = DTYPES["fp64" if cell.precision == "fp64" else "fp32"]
            dtype = kept if name.endswith("shift") else value.dtype
            assert state[name].dtype is dtype, (cell, name)


@pytest.mark.parametrize("stage", AXES["stage"])
@pytest.mark.parametrize("world", AXES["world"])
def test_equals_plain_torch(world: int, stage: int) -> None:
    cells = [
        Cell(**{key: row[key] for key in row if key != "world"})
        for row in rows()
        if (row["world"], row["stage"]) == (world, stage)
    ]
    check(cells, world)


def test_rows_cover_all_triples() -> None:
    covered = {frozenset(triple) for row in rows() for triple in combinations(row.items(), 3)}
    for names in combinations(AXES, 3):
        for values in product(*(AXES[name] for name in names)):
            row = dict(zip(names, values, strict=True))
            assert allowed(row) == (frozenset(row.items()) in covered), row
    assert len(rows()) < 200  # the cross product has 38,912


def test_gradient_accumulation_in_16_bits() -> None:
    """Results stay close to those of fp32 gradients, with and without offload."""
    axes = {"stage": (0, 1, 2, 3), "offload": ("", "cpu"), "dtype": ("bf16", "fp16")}
    cells = []
    for row in covering(axes, 2):
        extra = (("data_types", {"grad_accum_dtype": row["dtype"]}),)
        cells.append(
            Cell(row["stage"], "fp16", 4, CLIP, "sgd", offload=row["offload"], extra=extra)
        )
    check(cells, 3, tolerances=(2e-2, 2e-2))


CELLS = st.builds(
    Cell,
    stage=st.integers(0, 3),
    precision=st.sampled_from(["fp64", "fp32", "bf16", "fp16"]),
    micro_steps=st.sampled_from([1, 2, 4]),
    clip=st.sampled_from([0.0, CLIP]),
    optimizer=st.just("sgd"),
    overlap=st.booleans(),
    bucket=st.integers(1, 3000),
    offload=st.sampled_from(["", "cpu", "param"]),
    extra=st.sampled_from(
        [(), (("prescale_gradients", True),), (("gradient_predivide_factor", 2),)]
    ),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3)),
).filter(lambda cell: cell.offload != "param" or cell.stage == 3)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 3), st.lists(CELLS, min_size=1, max_size=4))
def test_random_shapes_and_configs(world: int, cells: list[Cell]) -> None:
    # Tiny models: the rounding of one or two 16-bit weights weighs more.
    check(cells, world, mixed_tolerances=(1e-2, 2e-2))


def test_tolerances_are_tight():
    """They detect a learning rate that is off by 1e-7, and even another split of the same batch in
    16 bits, let alone a wrong average."""
    data, model = list(zoo.batches(STEPS, SAMPLES)), make_model("fp64")

    def adamw_with_wrong_lr(groups: list[dict[str, Any]]) -> Any:
        groups[1]["lr"] *= 1 + 1e-7
        return OPTIMIZERS["adamw"](groups)

    _, wrong = zoo.train_reference(model, adamw_with_wrong_lr, data)
    _, expected, _ = reference(Cell(0, "fp64", optimizer="adamw"), 1)
    assert max(zoo.relative_error(wrong[name], expected[name]) for name in expected) > 1e-9
    for precision in ("bf16", "fp16"):
        _, expected, _ = reference(Cell(0, precision), 1)
        _, other, _ = reference(Cell(0, precision, 4), 1)
        error = max(zoo.relative_l2_error(other[name], value) for name, value in expected.items())
        assert error > TOLERANCES[precision, "sgd"][1]
        assert all(value.dtype is DTYPES[precision] for value in expected.values())

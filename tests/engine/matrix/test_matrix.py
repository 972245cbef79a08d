"""Stages x precisions x accumulation x clipping x overlap x bucket sizes, on one to three ranks."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine import zoo
from tests.engine.matrix.cells import CLIP, DTYPES, Cell, oracle_of, train
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


def check(cells: list[Cell], world: int, within: tuple[float, float] | None = None) -> None:
    """All cells on so many ranks, within their precision's tolerances, or within those given."""
    results = run_ranks(world, train, cells, timeout_s=240)
    for number, cell in enumerate(cells):
        per_loss, per_weight = within or TOLERANCES[cell.precision, cell.optimizer]
        right_losses, right, right_norm = oracle_of(cell, max(world, 1))
        losses, state, norm = results[0][number]
        assert losses == pytest.approx(right_losses, rel=per_loss), cell
        if not cell.clip:  # the oracle tells the norm after clipping
            assert norm == pytest.approx(right_norm, rel=10 * per_loss), cell
        assert all(others[number][0] == losses for others in results), cell
        distance = zoo.relative_l2 if cell.precision in ("bf16", "fp16") else zoo.relative
        worst = max(distance(state[name], value) for name, value in right.items())
        assert worst <= per_weight, cell
        assert all(state[name].dtype is value.dtype for name, value in right.items()), cell


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_sgd_over_stages_accumulation_clipping_overlap_and_buckets(world, precision):
    axes = product(range(4), (1, 4), (0.0, CLIP), (True, False), (150, 10_000))
    check(
        [
            Cell(stage, precision, micro_steps, clip, "sgd", overlap, bucket)
            for stage, micro_steps, clip, overlap, bucket in axes
        ],
        world,
    )


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_adamw_over_stages_and_accumulation(world, precision):
    axes = product(range(4), (1, 4))
    check(
        [Cell(stage, precision, micro_steps, CLIP, "adamw") for stage, micro_steps in axes], world
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_offload_over_stages_and_accumulation(world, precision):
    axes = product((0, 1, 2, 3), (1, 4), ("cpu", "param"))
    check(
        [
            Cell(stage, precision, micro_steps, CLIP, "adamw", offload=offload)
            for stage, micro_steps, offload in axes
            if stage == 3 or offload == "cpu"
        ],
        world,
    )


@pytest.mark.parametrize("sums", ["bf16", "fp16"])
@pytest.mark.parametrize("world", [1, 3])
def test_sums_in_16_bits_stay_near(world, sums):
    """Gradients are summed, and travel, in 16 bits: near fp32 sums, at every place they rest."""
    near = {"data_types": {"grad_accum_dtype": sums}}
    axes = product((0, 1, 2, 3), ("", "cpu"))
    check(
        [
            Cell(stage, "fp16", 4, CLIP, "sgd", offload=offload, more=tuple(near.items()))
            for stage, offload in axes
        ],
        world,
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
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 3), st.lists(cells, min_size=1, max_size=4))
def test_any_shape_and_any_config(world, drawn):
    for cell in drawn:  # a 16-bit weight or two of a tiny model may round the other way
        coarse = cell.precision in ("bf16", "fp16")
        check([cell], world, within=(1e-2, 2e-2) if coarse else None)


def test_the_tolerances_are_sharp():
    """In 16 bits even the same batch in other parts is told apart, let alone a wrong average."""
    for precision in ("bf16", "fp16"):
        _, right, _ = oracle_of(Cell(0, precision), 1)
        _, other, _ = oracle_of(Cell(0, precision, 4), 1)
        moved = max(zoo.relative_l2(other[name], value) for name, value in right.items())
        assert moved > TOLERANCES[precision, "sgd"][1]
        assert all(value.dtype is DTYPES[precision] for value in right.values())

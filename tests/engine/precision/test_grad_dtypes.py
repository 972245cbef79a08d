"""Dtypes of gradient accumulation, sums or means of gradients, the order of averaging."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import rayzero
from rayzero.engine.errors import ConfigError
from rayzero.engine.precision.policy import post_reduce_scale
from tests.engine import zoo
from tests.engine.matrix.cells import CLIP, Cell, reference, train
from tests.support.ranks import run_ranks


class SingleWeight(nn.Module):
    """A weight whose gradient is the input, and a weight that makes the unit longer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.other = nn.Parameter(torch.zeros(40))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


Terms = tuple[tuple[float, ...], ...]
"""The gradients by rank and micro-step."""


def gradients(
    rank: int, world: int, stage: int, rows: list[tuple[Terms, Any]]
) -> list[tuple[float, float]]:
    """What this rank's optimizer applies in a step of each row, 0 if others update the weight; and
    the gradient's norm."""
    return [_gradient(rank, world, stage, terms, more) for terms, more in rows]


def _gradient(rank: int, world: int, stage: int, terms: Terms, more: Any) -> tuple[float, float]:
    engine, *_ = rayzero.initialize(
        model=SingleWeight(),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0),
        config={
            "gradient_clipping": 0,
            "train_batch_size": max(world, 1) * len(terms[0]),
            "gradient_accumulation_steps": len(terms[0]),
            "zero_optimization": {"stage": stage},
            **more,
        },
    )
    for x in terms[rank]:
        engine.backward(engine(torch.tensor([x], dtype=next(engine.module.parameters()).dtype)))
        engine.step()
    assert engine.global_steps == 1
    weights = [param for group in engine.optimizer.param_groups for param in group["params"]]
    applied = 0.0 - sum(weight.sum().item() for weight in weights)  # all others stay zero
    return applied, 0.0 if engine.skipped_steps else engine.metrics.grad_norm


def accumulated_in(dtype: str) -> dict[str, Any]:
    return {"data_types": {"grad_accum_dtype": dtype}}


def sent_in(dtype: str) -> dict[str, Any]:
    return {"communication_data_type": dtype}


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 1.0}}
SUM = {"gradient_allreduce_op": "SUM"}
TINY = 6e-8
"""About the smallest fp16 number: a gradient divided before the sum may become 0."""
DIVISIONS: list[dict[str, Any]] = [
    {"prescale_gradients": True},
    {"gradient_predivide_factor": 4.0},
    {"gradient_predivide_factor": 0.5},
    {"prescale_gradients": True, "gradient_predivide_factor": 8.0},
]
# (gradients by rank and micro-step, config, the mean gradient; at stage 0 where that differs).
ROWS: list[tuple[Terms, dict[str, Any], float, float | None]] = [
    # 256 + 1 is 257 in fp32, and 256 in bf16, which has 8 bits.
    *(
        row
        for model in ({}, BF16)
        for row in (
            (((256.0, 1.0, 1.0, 1.0),), model, 259 / 4, None),
            (((256.0, 1.0, 1.0, 1.0),), model | accumulated_in("fp32"), 259 / 4, None),
            (((256.0, 1.0, 1.0, 1.0),), model | accumulated_in("bf16"), 256 / 4, None),
            (((256.0,), (1.0,)), model, 257 / 2, None),
            (((256.0,), (1.0,)), model | accumulated_in("bf16"), 256 / 2, None),
        )
    ),
    # Beyond 256 bf16 steps by 2 and rounds half to even: 257 becomes 256, and 259 260. Gradients
    # are rounded once; at stage 0 the sums travel back as well, and are rounded once more.
    (((257.0,), (1.0,)), sent_in("bf16"), 257 / 2, 256 / 2),
    (((259.0,), (1.0,)), sent_in("bf16"), 261 / 2, 260 / 2),
    (((256.0,), (2.0,)), sent_in("bf16"), 258 / 2, 258 / 2),
    (((259.0,), (1.0,)), sent_in("fp32"), 260 / 2, None),
    (((257.0,),), sent_in("bf16"), 257, None),  # alone nothing travels
    # The sum over ranks, of means over micro-steps.
    (((1.0, 3.0), (5.0, 7.0)), SUM, 8.0, None),
    (((1.0, 3.0), (5.0, 7.0)), {"gradient_allreduce_op": "mean"}, 4.0, None),
    # Sums that overflow fp16 skip the step.
    (((40_000.0, 40_000.0),), FP16, 40_000.0, None),
    (((40_000.0, 40_000.0),), FP16 | accumulated_in("fp16"), 0.0, None),
    (((TINY,), (TINY,)), FP16, TINY, None),
    (((TINY,), (TINY,)), FP16 | DIVISIONS[0], 0.0, None),
    (((TINY,), (TINY,)), FP16 | DIVISIONS[1], 0.0, None),
    (((TINY,), (TINY,)), FP16 | DIVISIONS[2], TINY, None),
    (((TINY,), (TINY,)), FP16 | DIVISIONS[3], 0.0, None),
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_rounding_of_sums(world: int, stage: int) -> None:
    rows = [row for row in ROWS if len(row[0]) == world]
    rows = [row for row in rows if row[1] is not SUM or stage < 3]  # as in DeepSpeed
    inputs = [(terms, more) for terms, more, *_ in rows]
    results = run_ranks(world if world > 1 else 0, gradients, stage, inputs)
    for row, *found in zip(rows, *results, strict=True):
        terms, _, expected, at_stage_0 = row
        expected = at_stage_0 if at_stage_0 is not None and not stage else expected
        rel = 0.01 if terms[0][0] == TINY else 0
        for value in map(max, zip(*found, strict=True)):
            assert value == pytest.approx(expected, rel=rel, abs=0), row


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (accumulated_in("fp16"), "grad_accum_dtype: fp32 or bf16 without fp16"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor"),
        ({"gradient_predivide_factor": -1.0}, "gradient_predivide_factor"),
    ],
)
def test_invalid_settings(more: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        _gradient(0, 0, 0, ((1.0,),), more)


def grads_bytes(rank: int, world: int, more: Any) -> dict[str, int]:
    engine, *_ = rayzero.initialize(
        model=zoo.make_model(), optimizer=zoo.sgd, config={"zero_optimization": {"stage": 2}} | more
    )
    return engine.metrics.bytes


def test_sums_in_bf16_take_half_the_memory() -> None:
    wide, narrow = (
        run_ranks(2, grads_bytes, BF16 | accumulated_in(dtype))[0] for dtype in ("fp32", "bf16")
    )
    assert narrow["main_grads"] * 2 == wide["main_grads"]
    assert {**narrow, "main_grads": 0} == {**wide, "main_grads": 0}


@pytest.mark.parametrize(("precision", "limit"), [("fp64", 1e-12), ("fp32", 1e-5), ("bf16", 3e-3)])
def test_order_of_averaging_only_changes_rounding(precision: str, limit: float) -> None:
    cells = [
        Cell(stage, precision, 4, CLIP, extra=tuple(more.items()))
        for stage, more in enumerate(DIVISIONS)
    ]
    results = run_ranks(2, train, cells, timeout_s=300)
    for number, cell in enumerate(cells):
        losses, state, _ = results[0][number]
        expected_losses, expected, _ = reference(cell, 2)
        assert losses == pytest.approx(expected_losses, rel=max(limit, 1e-9))
        distance = zoo.relative_l2_error if precision == "bf16" else zoo.relative_error
        assert max(distance(state[name], expected[name]) for name in expected) <= limit, cell


@given(st.integers(1, 16), st.integers(1, 64), st.booleans(), st.booleans(), st.floats(0.1, 100))
def test_scales_before_and_after_reduction_average(micro_steps, ranks, first, prescale, predivide):
    after = post_reduce_scale(
        micro_steps, ranks, average_before_reduce=first, prescale=prescale, predivide=predivide
    )
    share = 1 / (micro_steps * ranks)
    before = share / after  # what backward starts from for an average micro-batch
    by_config = before if not first else before * micro_steps
    expected = 1 / ranks if prescale or (first and predivide == 1.0) else 1 / predivide
    assert by_config == pytest.approx(expected)

"""Dtypes of gradient accumulation, and the order of reduction and averaging."""

from __future__ import annotations

from itertools import product
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


def gradient(stage: int, terms: list[list[float]], more: Any) -> float:
    """The mean gradient of a step that is applied on the rank that updates the weight."""
    world = len(terms)
    return max(run_ranks(world if world > 1 else 0, _gradient, stage, terms, more))


def _gradient(rank: int, world: int, stage: int, terms: list[list[float]], more: Any) -> float:
    """The gradient that this rank's optimizer applies.

    `terms` are the gradients by rank and micro-step.
    """
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
    return 0.0 - sum(weight.sum().item() for weight in weights)  # all others stay zero


FP32_SUM, BF16_SUM = {}, {"data_types": {"grad_accum_dtype": "bf16"}}
BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", [{}, BF16], ids=["fp32", "bf16"])
def test_micro_steps_are_summed_in_fp32_by_default(model, stage):
    """256 + 1 is 257 in fp32, and 256 in bf16, which has 8 bits."""
    terms = [[256.0, 1.0, 1.0, 1.0]]
    assert gradient(stage, terms, model) == 259 / 4
    explicit = model | {"data_types": {"grad_accum_dtype": "fp32"}}
    assert gradient(stage, terms, explicit) == 259 / 4
    assert gradient(stage, terms, model | BF16_SUM) == 256 / 4


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", [{}, BF16], ids=["fp32", "bf16"])
def test_ranks_are_summed_in_the_same_dtype(model, stage):
    terms = [[256.0], [1.0]]
    assert gradient(stage, terms, model) == 257 / 2
    assert gradient(stage, terms, model | BF16_SUM) == 256 / 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_compressed_gradients_are_rounded_once(stage):
    """bf16 steps by 2 beyond 256 and rounds half to even: 257 becomes 256, and 259 260.

    At stage 0 the sums travel back as well, and are rounded once more.
    """
    bf16, fp32 = ({"communication_data_type": name} for name in ("bf16", "fp32"))
    for terms, once, twice in (
        ([[257.0], [1.0]], 257, 256),
        ([[259.0], [1.0]], 261, 260),
        ([[256.0], [2.0]], 258, 258),
    ):
        assert gradient(stage, terms, fp32) == (terms[0][0] + terms[1][0]) / 2
        assert gradient(stage, terms, bf16) == (once if stage else twice) / 2
    assert gradient(stage, [[257.0]], bf16) == 257  # alone nothing travels


@pytest.mark.parametrize("stage", [0, 3])
def test_fp16_sums_that_overflow_skip_the_step(stage):
    fp16 = {"enabled": True, "loss_scale": 1.0}
    terms = [[40_000.0, 40_000.0]]
    assert gradient(stage, terms, {"fp16": fp16}) == 40_000.0
    sums = {"data_types": {"grad_accum_dtype": "fp16"}}
    assert gradient(stage, terms, {"fp16": fp16} | sums) == 0.0


def test_fp16_sums_need_fp16():
    with pytest.raises(ConfigError, match="grad_accum_dtype: fp32 or bf16 without fp16"):
        _gradient(0, 0, 0, [[1.0]], {"data_types": {"grad_accum_dtype": "fp16"}})


def grads_bytes(rank: int, world: int, more: Any) -> dict[str, int]:
    engine, *_ = rayzero.initialize(
        model=zoo.make_model(), optimizer=zoo.sgd, config={"zero_optimization": {"stage": 2}} | more
    )
    return engine.metrics.bytes


def test_sums_in_bf16_take_half_the_memory():
    wide, narrow = (run_ranks(2, grads_bytes, BF16 | more)[0] for more in (FP32_SUM, BF16_SUM))
    assert narrow["main_grads"] * 2 == wide["main_grads"]
    assert {**narrow, "main_grads": 0} == {**wide, "main_grads": 0}


DIVISIONS = [
    {"prescale_gradients": True},
    {"gradient_predivide_factor": 4.0},
    {"gradient_predivide_factor": 0.5},
    {"prescale_gradients": True, "gradient_predivide_factor": 8.0},
]


@pytest.mark.parametrize(("precision", "limit"), [("fp64", 1e-12), ("fp32", 1e-5), ("bf16", 3e-3)])
def test_order_of_averaging_only_changes_rounding(precision, limit):
    cells = [
        Cell(stage, precision, 4, CLIP, extra=tuple(more.items()))
        for stage, more in product((0, 1, 2, 3), DIVISIONS)
        if precision == "fp64" or stage == DIVISIONS.index(more)
    ]
    results = run_ranks(2, train, cells, timeout_s=300)
    for number, cell in enumerate(cells):
        losses, state, _ = results[0][number]
        expected_losses, expected, _ = reference(cell, 2)
        assert losses == pytest.approx(expected_losses, rel=max(limit, 1e-9))
        distance = zoo.relative_l2_error if precision == "bf16" else zoo.relative_error
        assert max(distance(state[name], expected[name]) for name in expected) <= limit, cell


@pytest.mark.parametrize("more", DIVISIONS)
def test_averaging_before_reduction_underflows_in_fp16(more):
    """The smallest fp16 number is 6e-8: a gradient divided before the sum may become 0."""
    fp16 = {"fp16": {"enabled": True, "loss_scale": 1.0}}
    terms = [[6e-8], [6e-8]]
    plain = gradient(1, terms, fp16)
    assert plain == pytest.approx(6e-8, rel=0.01)
    divided = gradient(1, terms, fp16 | more)
    if post_reduce_scale(1, 2, average_before_reduce=False, **_arguments(more)) > 0.5:
        assert divided == 0
    else:
        assert divided == plain


def _arguments(more: dict[str, Any]) -> dict[str, Any]:
    return {
        "prescale": more.get("prescale_gradients", False),
        "predivide": more.get("gradient_predivide_factor", 1.0),
    }


@given(
    st.integers(1, 16),
    st.integers(1, 64),
    st.booleans(),
    st.booleans(),
    st.floats(0.1, 100),
)
def test_scales_before_and_after_reduction_average(micro_steps, ranks, first, prescale, predivide):
    after = post_reduce_scale(
        micro_steps, ranks, average_before_reduce=first, prescale=prescale, predivide=predivide
    )
    share = 1 / (micro_steps * ranks)
    before = share / after  # what backward starts from for an average micro-batch
    assert before * after * micro_steps * ranks == pytest.approx(1.0)
    by_config = before if not first else before * micro_steps
    expected = 1 / ranks if prescale or (first and predivide == 1.0) else 1 / predivide
    assert by_config == pytest.approx(expected)


@pytest.mark.parametrize("factor", [0, -1.0])
def test_predivide_factor_must_be_positive(factor):
    with pytest.raises(ConfigError, match="gradient_predivide_factor"):
        _gradient(0, 0, 0, [[1.0]], {"gradient_predivide_factor": factor})

"""1-bit Adam: Adam during warm-up, compressed momenta after it."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from rayzero.engine.config import parse_config
from rayzero.engine.errors import ConfigError
from rayzero.engine.optim.onebit import OneBitAdam
from rayzero.engine.session import use_session
from tests.engine import zoo
from tests.engine.state.blocks import Block, StateSession
from tests.support.ranks import run_ranks as run_ranks_in_time

run_ranks = partial(run_ranks_in_time, timeout_s=300)
SAMPLES, LR, BETAS, EPS = 12, 1e-2, (0.9, 0.9), 1e-8


def config(freeze_step: int, **overrides: Any) -> dict[str, Any]:
    params = {"lr": LR, "betas": list(BETAS), "eps": EPS, "freeze_step": freeze_step}
    return {
        "train_batch_size": SAMPLES,
        "optimizer": {"type": "OneBitAdam", "params": params},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 0, "reduce_bucket_size": 150},
    } | overrides


def train(
    rank: int, world: int, settings: dict[str, Any], steps: range, blocks: list[Block] | None
) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = zoo.make_model(torch.float64 if settings.pop("double", False) else torch.float32)
    with use_session(StateSession(blocks)):
        engine, *_ = rayzero.initialize(model=model, config=settings)
    losses, data = [], list(zoo.batches(steps.stop, SAMPLES))
    for step in steps:
        part = data[step].chunk(max(world, 1))[rank]
        engine.backward(engine(part[:, :-1], targets=part[:, 1:])["loss"])
        engine.step()
        losses.append(engine.metrics.loss)
    local = {name: param.detach().clone() for name, param in model.named_parameters()}
    return losses, local, engine.metrics.collectives, Block.of(engine)


def train_reference(steps: int, clip: float = 0.0) -> dict[str, Tensor]:
    """Train in float64 with Adam without bias correction, as in the 1-bit Adam paper."""
    torch.manual_seed(0)
    model = zoo.make_model(torch.float64)
    params = [param for param in model.parameters() if param.requires_grad]
    momenta = [torch.zeros_like(param) for param in params]
    variances = [torch.zeros_like(param) for param in params]
    for batch in zoo.batches(steps, SAMPLES):
        model.zero_grad()
        model(batch[:, :-1], targets=batch[:, 1:])["loss"].backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(params, clip)
        with torch.no_grad():
            for param, m, v in zip(params, momenta, variances, strict=True):
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                m.copy_(BETAS[0] * m + (1 - BETAS[0]) * grad)
                v.copy_(BETAS[1] * v + (1 - BETAS[1]) * grad * grad)
                param -= LR * m / (v.sqrt() + EPS) * (v > 0)
    return {name: param.detach() for name, param in model.named_parameters()}


CLIP = 0.05  # a tenth of the gradients' norms


@pytest.mark.parametrize(("world", "clip"), [(0, 0.0), (2, CLIP), (3, 0.0)])
def test_warmup_equals_adam(world: int, clip: float) -> None:
    expected = train_reference(4, clip)
    settings = config(9, double=True, gradient_clipping=clip)
    for _, local, traffic, _ in run_ranks(world, train, settings, range(4), None):
        for name, value in expected.items():
            torch.testing.assert_close(local[name], value, rtol=1e-6, atol=1e-7)
        assert "all_to_all" not in traffic


@pytest.mark.parametrize("world", [2, 3])
def test_signs_are_sent_after_warmup(world: int) -> None:
    warmup = run_ranks(world, train, config(4), range(4), None)
    results = run_ranks(world, train, config(4), range(12), None)
    for losses, local, traffic, _ in results:
        assert losses == results[0][0]
        assert all(torch.equal(local[name], results[0][1][name]) for name in local)
        assert losses[-1] < losses[4] < losses[0]
        assert traffic["all_reduce"] == warmup[0][2]["all_reduce"]  # only during warm-up
        full = traffic["all_reduce"]["bytes"] / 4 / 2  # a step's gradients
        assert traffic["all_to_all"]["bytes"] / 8 < full / 16
        assert traffic["all_gather"]["bytes"] == traffic["all_to_all"]["bytes"]


def test_resume_across_freeze_is_bit_identical() -> None:
    uninterrupted = run_ranks(2, train, config(3), range(7), None)
    first = run_ranks(2, train, config(3), range(5), None)
    second = run_ranks(2, train, config(3), range(5, 7), [result[3] for result in first])
    for expected, actual in zip(uninterrupted, second, strict=True):
        assert actual[3].data == expected[3].data


def test_resume_at_smaller_world_size() -> None:
    first = run_ranks(3, train, config(3), range(5), None)
    blocks = [result[3] for result in first]
    for world in (2, 0):
        results = run_ranks(world, train, config(3), range(5, 9), blocks)
        assert results[0][0][-1] < first[0][0][-1]


def train_and_log(rank: int, world: int, clip: float) -> tuple[list[float], list[str]]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rayzero.engine")
    logger.addHandler(handler)
    try:
        losses, *_ = train(rank, world, config(2, gradient_clipping=clip), range(5), None)
    finally:
        logger.removeHandler(handler)
    return losses, [it for it in told if "gradient_clipping" in it]


def test_clipping_ends_with_the_warmup_which_is_said_once() -> None:
    (losses, told), (_, nothing) = run_ranks(2, train_and_log, CLIP)
    assert len(told) == 1
    assert "OneBitAdam reduces momenta" in told[0]
    assert nothing == []
    unclipped, silent = run_ranks(2, train_and_log, 0.0)[0]
    assert losses[:1] == unclipped[:1]
    assert losses[1:3] != unclipped[1:3]
    assert silent == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage: 0 with optimizer.type One"),
        ({"communication_data_type": "bf16"}, "compression, and communication_data_type is bf16;"),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"amsgrad": True}}},
            "variances are frozen",
        ),
    ],
)
def test_unsupported_combinations(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(config(3) | overrides)


def test_invalid_arguments() -> None:
    param = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="freeze_step is 0"):
        OneBitAdam(param, freeze_step=0)


def test_weights_without_a_gradient_do_not_change() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = OneBitAdam([weight], lr=0.1, freeze_step=2)
    for step in range(4):
        weight.grad = torch.tensor([1.0, -1.0, 0.0, 0.0])
        if step > 1:
            weight.grad = torch.tensor([1.0, -1.0, 1.0, -1.0])  # reduced signs are never zero
        optimizer.step()
    assert weight[2:].tolist() == [1.0, 1.0]
    assert weight[0] < 1 < weight[1]

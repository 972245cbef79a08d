"""1-bit Adam, 0/1 Adam and 1-bit LAMB: equal to the papers' equations in plain torch where momenta
are sent without loss. As signs they train, equally on all ranks, through repairs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from rayzero.engine.compression import gradients as reductions
from rayzero.engine.compression.codecs import CastCodec
from rayzero.engine.config import parse_config
from rayzero.engine.config.model import parse_params
from rayzero.engine.config.optimizers import ZeroOneAdamParams
from rayzero.engine.errors import ConfigError
from rayzero.engine.optim.onebit import OneBitAdam, OneBitLamb
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
    losses = zoo.train(engine, list(zoo.batches(steps.stop, SAMPLES))[steps.start :])
    local = {name: param.detach().clone() for name, param in model.named_parameters()}
    return losses, local, engine.metrics.collectives, Block.of(engine)


CLIP = 0.05  # a tenth of the gradients' norms


@pytest.mark.parametrize("clip", [CLIP, 0.0])
def test_clipping_that_ends_with_the_warmup_is_said(
    clip: float, caplog: pytest.LogCaptureFixture
) -> None:
    train(0, 1, config(1, gradient_clipping=clip), range(3), None)
    told = [it for it in caplog.messages if "gradient_clipping" in it]
    assert len(told) == bool(clip)
    assert all("OneBitAdam reduces momenta" in it for it in told)


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


# 0/1 Adam and 1-bit LAMB

STEPS, FREEZE = 9, 4
LAMB = {"freeze_step": FREEZE, "weight_decay": 0.1, "coeff_beta": 0.5, "factor_threshold": 0.2}
ADAM = {"var_freeze_step": 7, "var_update_scaler": 2, "local_step_clipper": 4}
OPTIONS = {"OneBitAdam": {"freeze_step": FREEZE}, "ZeroOneAdam": ADAM, "OneBitLamb": LAMB}


def settings(name: str, **more: Any) -> dict[str, Any]:
    params = {"lr": LR, "betas": list(BETAS), "eps": EPS}
    params |= OPTIONS[name]
    return config(1) | {"optimizer": {"type": name, "params": params}} | more


def train_without_loss(
    rank: int, world: int, name: str, clip: float
) -> tuple[dict[str, Tensor], Any]:
    codec = reductions.SignCodec
    reductions.SignCodec = lambda block: CastCodec("exact", torch.float64)  # type: ignore[assignment, misc, return-value]
    try:
        document = settings(name, double=True, gradient_clipping=clip)
        _, local, traffic, _ = train(rank, world, document, range(STEPS), None)
    finally:
        reductions.SignCodec = codec  # type: ignore[misc]
    return local, traffic


def gradients(model: torch.nn.Module, clip: float) -> Any:
    """(parameters, an iterator that computes each step's gradients), clipped until `FREEZE`."""
    params = [param for param in model.parameters() if param.requires_grad]

    def steps() -> Any:
        for step, batch in enumerate(zoo.batches(STEPS, SAMPLES)):
            model.zero_grad()
            with torch.enable_grad():
                model(batch[:, :-1], targets=batch[:, 1:])["loss"].backward()
            if clip and step < FREEZE:
                torch.nn.utils.clip_grad_norm_(params, clip)
            yield [torch.zeros_like(it) if it.grad is None else it.grad.clone() for it in params]

    return params, steps()


@torch.no_grad()
def adam(params: list[Tensor], steps: Any, changes: Sequence[int] = range(1, FREEZE + 1)) -> None:
    """Without bias correction, as in the papers; variances change in some steps only."""
    m, v = ([torch.zeros_like(param) for param in params] for _ in range(2))
    for step, grads in enumerate(steps, 1):
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            m[i] = BETAS[0] * m[i] + (1 - BETAS[0]) * grad
            if step in changes:
                v[i] = BETAS[1] * v[i] + (1 - BETAS[1]) * grad**2
            param -= LR * m[i] / (v[i].sqrt() + EPS) * (v[i] > 0)


def zero_one_adam(params: list[Tensor], steps: Any) -> None:
    """Algorithm 1 of the paper with a synchronization in each step. With `var_update_scaler` 2
    variances change in the steps 1, 2, then 4, 6, then 10, ..., while at most 7."""
    adam(params, steps, (1, 2, 4, 6))


@torch.no_grad()
def one_bit_lamb(params: list[Tensor], steps: Any) -> None:
    """The paper's algorithm, with DeepSpeed's treatment of weight decay in the factor."""
    m, v, fresh = ([torch.zeros_like(param) for param in params] for _ in range(3))
    mean, last = [0.0] * len(params), [1.0] * len(params)
    for step, grads in enumerate(steps, 1):
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            m[i] = BETAS[0] * m[i] + (1 - BETAS[0]) * grad
            if step <= FREEZE:
                v[i] = BETAS[1] * v[i] + (1 - BETAS[1]) * grad**2
                fresh[i] = v[i].clone()
            else:
                fresh[i] = BETAS[1] * fresh[i] + (1 - BETAS[1]) * grad**2
            prelim = m[i] / (v[i].sqrt() + EPS) * (v[i] > 0)
            update = prelim + 0.1 * param
            if step <= FREEZE:
                ratio = 1.0
                if param.norm() > 0 and update.norm() > 0:
                    ratio = float((param.norm() / update.norm()).clamp(0.01, 10.0))
                if ratio != 1.0:
                    mean[i] = 0.5 * mean[i] + 0.5 * ratio
            else:
                roots = (v[i].sqrt() + EPS) / (fresh[i].sqrt() + EPS)
                factor = float(roots[v[i] > 0].max()) if (v[i] > 0).any() else 0.0
                part = min(1.0, float(prelim.norm() / update.norm()))
                factor = min(max(factor * part + 1 - part, 0.5), 4.0)
                last[i] = max(min(factor, last[i] * 1.2), last[i] * 0.8)
                ratio = mean[i] * last[i]
            param -= LR * ratio * update


@pytest.mark.parametrize(
    ("name", "oracle", "world", "clip"),
    [
        ("OneBitAdam", adam, 2, CLIP),
        ("OneBitAdam", adam, 3, 0.0),
        ("ZeroOneAdam", zero_one_adam, 2, 0.0),
        ("OneBitLamb", one_bit_lamb, 2, 0.0),
    ],
)
def test_equals_the_papers_equations(name: str, oracle: Any, world: int, clip: float) -> None:
    torch.manual_seed(0)
    model = zoo.make_model(torch.float64)
    oracle(*gradients(model, clip))
    for local, traffic in run_ranks(world, train_without_loss, name, clip):
        assert "all_to_all" in traffic  # momenta were reduced
        for key, value in model.named_parameters():
            torch.testing.assert_close(local[key], value.detach(), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", OPTIONS)
def test_signs_train_and_a_repair_continues(name: str) -> None:
    whole = run_ranks(2, train, settings(name), range(STEPS), None)
    losses, local, traffic, _ = whole[0]
    assert losses[-1] < losses[FREEZE] < losses[0]
    assert all(torch.equal(local[key], whole[1][1][key]) for key in local)
    assert traffic["all_to_all"]["bytes"] < traffic["all_reduce"]["bytes"] / 8
    if name == "OneBitAdam":  # only signs after the warm-up
        full = traffic["all_reduce"]["bytes"] / FREEZE / 2  # a step's gradients
        assert traffic["all_to_all"]["bytes"] / (STEPS - FREEZE) < full / 16
        assert traffic["all_gather"]["bytes"] == traffic["all_to_all"]["bytes"]
    first = run_ranks(2, train, settings(name), range(6), None)
    blocks = [result[3] for result in first]
    second = run_ranks(2, train, settings(name), range(6, STEPS), blocks)
    for expected, actual in zip(whole, second, strict=True):
        assert actual[3].data == expected[3].data
    smaller = run_ranks(0, train, settings(name), range(6, STEPS), blocks)[0]
    assert smaller[0][-1] < first[0][0][0]


@pytest.mark.parametrize("make", [OneBitAdam, OneBitLamb])
def test_elements_without_a_gradient_do_not_change(make: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = make([weight], lr=0.1, freeze_step=2)
    for step in range(4):  # reduced signs are never zero
        signs = [1.0, -1.0, 1.0, -1.0] if step > 1 else [1.0, -1.0, 0.0, 0.0]
        weight.grad = torch.tensor(signs)
        optimizer.step()
    assert weight[2:].tolist() == [1.0, 1.0]
    assert weight[0] < 1 < weight[1]


def test_local_steps_are_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    parse_params("optimizer", ZeroOneAdamParams, {"lr": LR}).arguments()
    assert caplog.text == ""
    parse_params("optimizer", ZeroOneAdamParams, ADAM).arguments()
    assert "no effect: ['local_step_clipper']: every step is synchronized" in caplog.text

"""A saved optimizer state that another optimizer is to load."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from rayzero.engine.checkpoint.errors import CheckpointMismatchError
from tests.engine import zoo
from tests.engine.api.saving import SAMPLES, WARMUP, make_engine, train
from tests.support.ranks import run_ranks

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}
AMSGRAD = {"type": "torch.optim.AdamW", "params": {"lr": 1e-2, "amsgrad": True}}
SGD = {"type": "SGD", "params": {"lr": 1e-2}}
MOMENTUM = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
LION = {"type": "Lion", "params": {"lr": 1e-2}}
LAMB = {"type": "Lamb", "params": {"lr": 1e-2}}


@pytest.mark.parametrize(
    ("saved", "loaded", "seen"),
    [
        (ADAMW, SGD, "exp_avg, exp_avg_sq for each weight, and SGD keeps none"),
        (ADAMW, MOMENTUM, "and SGD keeps momentum_buffer"),
        (MOMENTUM, SGD, "momentum_buffer for each weight, and SGD keeps none"),
        (MOMENTUM, ADAMW, "keeps exp_avg, exp_avg_sq"),
        (ADAMW, AMSGRAD, "keeps exp_avg, exp_avg_sq, max_exp_avg_sq"),
        (AMSGRAD, ADAMW, "max_exp_avg_sq for each weight, and"),
        (ADAMW, LION, "and Lion keeps exp_avg"),
    ],
)
def test_state_of_another_optimizer_is_refused(
    tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any], seen: str
) -> None:
    engine = make_engine(0, optimizer=saved)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path)
    other = make_engine(0, optimizer=loaded, scheduler=WARMUP)
    with pytest.raises(CheckpointMismatchError, match=seen) as refused:
        other.load_checkpoint(tmp_path)
    assert "load_optimizer_states=False" in refused.value.fix
    assert '"other_optimizer_state": "reset"' in refused.value.fix
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    train(other, range(2, 4))


def moments(state: dict[str, Any]) -> list[tuple[str, list[float]]]:
    tensors = {key: it for key, it in state.items() if torch.is_tensor(it) and it.ndim}
    return [(key, tensors[key].tolist()) for key in sorted(tensors)]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (ADAMW, {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.5, 0.5]}}),
        (ADAMW, LAMB),
        (SGD, MOMENTUM),
        (MOMENTUM, {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.5, "nesterov": True}}),
    ],
)
def test_state_with_the_same_parts_is_loaded(
    tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any]
) -> None:
    engine = make_engine(0, optimizer=saved)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path)
    other = make_engine(0, optimizer=loaded)
    other.load_checkpoint(tmp_path)
    old, new = (sorted(map(moments, it.optimizer.state.values())) for it in (engine, other))
    assert old == new
    train(other, range(2, 4))


def reset_and_train(rank: int, world: int, stage: int, folder: str) -> dict[str, torch.Tensor]:
    engine = make_engine(stage, optimizer=ADAMW, scheduler=WARMUP)
    train(engine, range(2))
    engine.save_checkpoint(folder)
    saved = engine.state_dict()
    config = {"optimizer": MOMENTUM, "rayzero": {"other_optimizer_state": "reset"}}
    other = make_engine(stage, zoo.make_model(torch.float64, seed=5), **config)
    other.load_checkpoint(folder)
    assert other.global_steps == 2
    train(other, range(2, 5))
    trained = other.state_dict()
    if rank:  # only rank 0 has them
        return saved
    expected = zoo.make_model(torch.float64)
    expected.load_state_dict(saved)
    optimizer = torch.optim.SGD(zoo.two_groups(expected), lr=1e-2, momentum=0.9)
    for batch in list(zoo.batches(5, SAMPLES))[2:]:
        optimizer.zero_grad()
        expected(batch[:, :-1], targets=batch[:, 1:])["loss"].backward()
        optimizer.step()
    for name, value in trained.items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-10, atol=1e-12)
    return saved


@pytest.mark.parametrize(("stage", "world"), [(0, 0), (2, 2), (3, 2)])
def test_reset_starts_the_optimizer_anew(stage: int, world: int, tmp_path: Path) -> None:
    """As plain torch's from the saved weights, with the options of the config."""
    run_ranks(world, reset_and_train, stage, str(tmp_path))


def test_reset_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(0, optimizer=ADAMW)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path)
    other = make_engine(0, optimizer=SGD, rayzero={"other_optimizer_state": "reset"})
    with caplog.at_level(logging.WARNING, "rayzero.engine"):
        other.load_checkpoint(tmp_path)
    warning = "SGD keeps none: it is not loaded, and the optimizer starts from its initial state"
    assert warning in caplog.text

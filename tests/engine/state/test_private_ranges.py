"""Which state only the engine changes, and what a script has changed of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from rayzero.engine.api.tensor_fragments import safe_set_full_optimizer_state
from rayzero.engine.engine import Engine
from rayzero.engine.session import use_session
from rayzero.engine.state.load import LOAD_ALL
from tests.engine.state.blocks import Block, BlocksSource, StateSession
from tests.support.ranks import run_ranks
from tests.workers.recovery_jobs import Data, engine_config, make_model

SEED = 3


def build(session: StateSession, config: dict[str, Any]) -> tuple[Engine, Any]:
    with use_session(session):
        engine, _, loader, _ = rayzero.initialize(
            model=make_model(torch.float64), training_data=Data(), config=config
        )
    return engine, loader


def train(engine: Engine, loader: Any, end: int) -> None:
    for x, y in loader.steps(end - engine.progress.step):
        engine.backward(nn.functional.mse_loss(engine(x).double(), y))
        engine.step()


def held_names(rank: int, world: int, stage: int) -> set[str]:
    model = make_model(torch.float64)
    model[2].requires_grad_(False)
    with use_session(StateSession(seed=SEED)):
        engine, _, loader, _ = rayzero.initialize(
            model=model, training_data=Data(), config=engine_config(stage)
        )
    train(engine, loader, 1)
    return {one.name for part in engine.state.private_ranges() for one in part.ranges}


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_weights_are_kept_where_the_script_does_not_see_them(stage: int):
    names = set[str]().union(*run_ranks(2, held_names, stage))
    assert "optimizer.exp_avg/4.bias" in names
    assert ("weights/0.weight" in names) == (stage == 3)
    assert ("weights/2.weight" in names) == (stage == 3)


def changed_by_script(rank: int, world: int) -> list[bool]:
    engine, loader = build(StateSession(seed=SEED), engine_config(3))
    train(engine, loader, 1)
    seen = [engine.state.altered]
    param = next(engine.module.parameters())
    safe_set_full_optimizer_state(param, torch.zeros_like(param), "exp_avg")
    seen.append(engine.state.altered)
    train(engine, loader, 2)
    seen.append(engine.state.altered)
    engine.state.load_from(BlocksSource([Block.of(engine)]), LOAD_ALL)
    return [*seen, engine.state.altered]


def test_state_that_the_script_has_changed_is_known():
    assert run_ranks(1, changed_by_script)[0] == [False, True, False, True]

"""Where a step's time goes, as the engine tells it: the parts are the whole."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import rayzero
from rayzero.engine.metrics import PhaseTimer

CONFIG = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
}


class Slow(nn.Module):
    """Its forward takes 30 ms and more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return self.linear(x).sum()


class SlowData:
    """A sample takes 10 ms and more."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.ones(3)


def test_every_moment_belongs_to_one_phase():
    entered: list[str] = []
    phases = PhaseTimer(entered.append)
    phases.enter("forward")
    time.sleep(0.02)
    phases.leave()
    time.sleep(0.03)
    first = phases.end_step(data_wait_s=0.01)
    assert entered == ["forward"]
    assert first["forward"] >= 0.02
    assert first["data"] == 0.01
    assert first["other"] >= 0.02
    assert phases.end_step(data_wait_s=5.0)["other"] == 0  # no more waits than there was time


def test_the_phases_of_a_step_add_up_to_it():
    engine, *_ = rayzero.initialize(model=Slow(), config=CONFIG)
    for _ in range(3):
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3)))
            engine.step()
            time.sleep(0.02)
    metrics = engine.metrics
    assert sum(metrics.phases.values()) == pytest.approx(metrics.step_s, abs=1e-3)
    assert metrics.phases["forward"] >= 0.06
    assert metrics.phases["other"] >= 0.04
    assert {"backward", "reduce", "update", "publish", "data"} <= set(metrics.phases)
    assert metrics.phases["data"] == 0
    assert metrics.to_flat_dict()["phases/forward"] == metrics.phases["forward"]
    assert metrics.step_samples == 4


def test_the_wait_for_a_slow_loader_is_data():
    engine, _, loader, _ = rayzero.initialize(
        model=nn.Linear(3, 1), config=CONFIG, training_data=SlowData()
    )
    for batch in loader.steps(3):
        engine.backward(engine(batch).sum())
        engine.step()
    metrics = engine.metrics
    assert 0.02 <= metrics.phases["data"] <= metrics.step_s  # of 40 ms; what was read ahead is free
    assert sum(metrics.phases.values()) == pytest.approx(metrics.step_s, abs=1e-3)

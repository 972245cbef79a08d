"""Phase times of a step: they add up to the step time."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import rayzero
from rayzero.engine import metrics as module
from rayzero.engine.metrics import PhaseTimer

CONFIG = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
}


class SlowModel(nn.Module):
    """Its forward takes at least 30 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return self.linear(x).sum()


class SlowDataset:
    """A sample takes at least 10 ms."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.ones(3)


def test_phase_timer_attributes_all_time():
    entered: list[str] = []
    phases = PhaseTimer(entered.append)
    phases.enter("forward")
    time.sleep(0.02)
    phases.leave()
    time.sleep(0.03)
    first = phases.end_step(0.01, time.perf_counter())
    assert entered == ["forward"]
    assert first["forward"] >= 0.02
    assert first["data"] == 0.01
    assert first["other"] >= 0.02
    assert phases.end_step(5.0, time.perf_counter())["other"] == 0  # it waited less


def test_phases_add_up_to_step_time():
    engine, *_ = rayzero.initialize(model=SlowModel(), config=CONFIG)
    for _ in range(3):
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3)))
            engine.step()
            time.sleep(0.02)
    metrics = engine.metrics
    assert sum(metrics.phases.values()) == pytest.approx(metrics.step_s, abs=1e-6)
    assert metrics.phases["forward"] >= 0.06
    assert metrics.phases["other"] >= 0.04
    assert {"backward", "reduce", "update", "publish", "data"} <= set(metrics.phases)
    assert metrics.phases["data"] == 0
    assert metrics.to_flat_dict()["phases/forward"] == metrics.phases["forward"]
    assert metrics.step_samples == 4


def test_loader_wait_counts_as_data():
    engine, _, loader, _ = rayzero.initialize(
        model=nn.Linear(3, 1), config=CONFIG, training_data=SlowDataset()
    )
    for batch in loader.steps(3):
        engine.backward(engine(batch).sum())
        engine.step()
    metrics = engine.metrics
    assert 0.02 <= metrics.phases["data"] <= metrics.step_s  # up to 40 ms, less prefetch
    assert sum(metrics.phases.values()) == pytest.approx(metrics.step_s, abs=1e-6)


def test_wait_for_other_ranks_is_not_the_next_steps_time(monkeypatch: pytest.MonkeyPatch):
    """A step was lost with a rank; the engine was re-cut; the next step begins."""
    waited_s = 0.0
    monkeypatch.setattr(module, "perf_counter", lambda: time.perf_counter() + waited_s)
    engine = rayzero.initialize(model=nn.Linear(4, 1), config=CONFIG)[0]

    def train() -> None:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()

    train()
    waited_s = 1000.0
    engine.survival.begin_step()
    train()
    assert engine.metrics.step_s < 500.0
    assert sum(engine.metrics.phases.values()) == pytest.approx(engine.metrics.step_s, abs=1e-3)

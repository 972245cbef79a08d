"""Phase times of a step, which add up to its time; what is told of skipped steps."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import rayzero
from rayzero.engine import metrics as module
from rayzero.engine.metrics import SkippedRun

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


def test_a_run_of_skipped_steps_is_told_at_growing_intervals() -> None:
    run = SkippedRun()
    told = {step: text for step in range(1, 101) if (text := run.add(step, finite=step < 3))}
    assert list(told) == [3, 4, 6, 10, 18, 34, 66]
    assert told[3] == "step 3 skipped on every rank"
    assert told[10] == "steps 3 to 10 skipped on every rank, 8 in a row"
    assert run.add(101, finite=True) == ""
    assert run.add(102, finite=False) == "step 102 skipped on every rank"

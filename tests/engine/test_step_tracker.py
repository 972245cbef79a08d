"""Phases of a training step, and `Engine.build`, the constructor without DeepSpeed's names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rayzero
from rayzero.engine.step_tracker import Boundary, StepPhase, StepTracker


def run_backward(tracker: StepTracker) -> StepPhase:
    with tracker.backward():
        assert tracker.phase is StepPhase.BACKWARD
    return tracker.phase


def test_step_of_two_micro_steps() -> None:
    tracker = StepTracker()
    assert not tracker.has_gradients
    assert run_backward(tracker) is StepPhase.STEP_PENDING
    tracker.phase = StepPhase.ACCUMULATING
    assert run_backward(tracker) is StepPhase.STEP_PENDING
    with tracker.update():
        assert tracker.has_gradients
    assert tracker.phase is StepPhase.EMPTY


def test_no_step_within_no_sync_or_before_declared_boundary() -> None:
    tracker = StepTracker()
    tracker.no_sync = True
    assert run_backward(tracker) is StepPhase.ACCUMULATING
    tracker.no_sync, tracker.boundary = False, Boundary.NOT_LAST
    assert run_backward(tracker) is StepPhase.ACCUMULATING
    assert tracker.skips_step
    tracker.boundary = Boundary.LAST
    assert run_backward(tracker) is StepPhase.STEP_PENDING


@pytest.mark.parametrize("phase", [StepPhase.STEP_PENDING, StepPhase.UPDATING])
def test_a_transition_outside_the_table_is_refused(phase: StepPhase) -> None:
    with pytest.raises(RuntimeError, match="cannot go from EMPTY"):
        StepTracker().phase = phase


def test_backward_can_be_retried_after_failure() -> None:
    tracker = StepTracker()
    with pytest.raises(ValueError, match="batch"), tracker.backward():
        raise ValueError("batch")
    assert run_backward(tracker) is StepPhase.STEP_PENDING
    with pytest.raises(ValueError, match="vote"), tracker.update():
        raise ValueError("vote")
    assert run_backward(tracker) is StepPhase.STEP_PENDING


def test_built_engine_trains_like_pytorch() -> None:
    model, plain = nn.Linear(3, 1), nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    engine = rayzero.Engine.build(
        model,
        lambda groups: torch.optim.SGD(groups, lr=0.1),
        config={"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0},
    )
    assert type(engine) is rayzero.Engine
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        batch = torch.full((2, 3), step + 1.0)
        engine.backward(engine(batch).mean())
        engine.step()
        optimizer.zero_grad()
        plain(batch).mean().backward()
        optimizer.step()
    torch.testing.assert_close(engine.state_dict(), dict(plain.state_dict()))


def test_save_and_load(tmp_path: object) -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "train_batch_size": 2}
    first = rayzero.Engine.build(nn.Linear(3, 1), config=config)
    first.backward(first(torch.ones(2, 3)).mean())
    first.step()
    first.save(str(tmp_path), client_state={"epoch": 1})
    second = rayzero.Engine.build(nn.Linear(3, 1), config=config)
    assert second.load(str(tmp_path)) == (f"{tmp_path}/global_step1", {"epoch": 1})
    torch.testing.assert_close(second.state_dict(), first.state_dict())


def test_initialize_returns_an_engine() -> None:
    engine, *_ = rayzero.initialize(model=nn.Linear(3, 1))
    assert isinstance(engine, rayzero.Engine)
    public = [name for name in vars(rayzero.Engine) if not name.startswith("_")]
    assert len(public) <= 26

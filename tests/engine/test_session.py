"""Use of a host session by the engine: config, seed, callbacks, lifetime."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from rayzero.engine.session import (
    BesideSession,
    HostSession,
    StepRequests,
    current_session,
    use_session,
)
from tests.engine.state.blocks import StateSession
from tests.support.ranks import run_ranks

CONFIG = {
    "gradient_clipping": 0,
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
}


class RecordingSession(StateSession):
    """Records the engine's callbacks."""

    def __init__(self, config: dict[str, Any] | None = None, seed: int = 0) -> None:
        super().__init__(engine_config=config, seed=seed)
        self.engines: list[rayzero.Engine] = []
        self.phases: list[str] = []
        self.steps: list[dict[str, float]] = []

    def on_engine_ready(self, engine: rayzero.Engine) -> None:
        self.engines.append(engine)

    def on_phase(self, name: str) -> None:
        self.phases.append(name)

    def on_step_end(self, metrics: dict[str, float], agreed: StepRequests) -> None:
        self.steps.append(metrics)


def test_use_session_restores_the_outer_session_of_its_thread() -> None:
    elsewhere: list[Any] = []
    outer, inner = RecordingSession(), RecordingSession()
    with use_session(outer):
        with suppress(ValueError), use_session(inner):
            assert current_session() is inner
            thread = threading.Thread(target=lambda: elsewhere.append(current_session()))
            thread.start()
            thread.join(10)
            raise ValueError("user error")
        assert current_session() is outer
    assert current_session() is elsewhere[-1] is None


def test_job_config_is_the_default() -> None:
    with use_session(RecordingSession(CONFIG)):
        engine, *_ = rayzero.initialize(model=nn.Linear(3, 1))
        assert engine.settings.batches.global_batch == 4
        engine, *_ = rayzero.initialize(
            model=nn.Linear(3, 1), config=CONFIG | {"train_batch_size": 2}
        )
        assert engine.settings.batches.global_batch == 2
    with use_session(RecordingSession(None)):
        engine, *_ = rayzero.initialize(
            model=nn.Linear(3, 1), optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0)
        )
        assert engine.settings.batches.global_batch == 1


def test_session_receives_engine_phases_and_steps() -> None:
    session = RecordingSession(CONFIG)
    with use_session(session):
        engine, *_ = rayzero.initialize(model=nn.Linear(3, 1))
    assert session.engines == [engine._engine]
    for _ in range(2):  # two micro-steps make a step
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
    engine.state_dict()
    micro_step = ["forward", "backward", "outside"]
    assert session.phases == [*micro_step, *micro_step, "reduce", "update", "publish", "gather"]
    (metrics,) = session.steps
    assert (metrics["step"], metrics["samples"]) == (1, 4)
    assert metrics.pop("rank_loss") == pytest.approx(metrics["loss"])  # of the first steps
    assert metrics.pop("bad_samples") == 0
    assert metrics == engine.metrics.to_flat_dict()
    assert all(isinstance(value, int | float) for value in metrics.values())


def test_an_engine_beside_the_hosts_is_neither_restored_nor_reported() -> None:
    class FirstThatTrains(RecordingSession):
        def session_for(self, name: str | None, *, trains: bool) -> HostSession:
            return self if trains and not self.engines else BesideSession(self)

    session = FirstThatTrains(CONFIG | {"train_batch_size": 2})
    with use_session(session):
        frozen, *_ = rayzero.initialize(model=nn.Linear(3, 1), config={"train_batch_size": 2})
        engines = [rayzero.initialize(model=nn.Linear(3, 1))[0] for _ in range(2)]
    assert session.engines == [engines[0]._engine]
    for step in range(1, 3):
        for engine in engines:
            engine.backward(engine(frozen(torch.ones(2, 3)) * torch.ones(2, 3)).sum())
            engine.step()
        assert len(session.steps) == step
        assert session.phases.count("backward") == 2 * step  # both engines' are signs of life


def test_skipped_step_is_reported_without_update() -> None:
    session = RecordingSession(CONFIG | {"train_batch_size": 2})
    with use_session(session):
        engine, *_ = rayzero.initialize(model=nn.Linear(3, 1))
    engine.backward(engine(torch.ones(2, 3)).sum() * float("nan"))
    engine.step()
    assert "update" not in session.phases
    assert session.steps[0]["skipped_steps"] == 1


def test_job_seed_determines_data_order() -> None:
    data: Any = list(range(50))

    def order(seed: int) -> list[int]:
        with use_session(RecordingSession(CONFIG, seed)):
            _, _, loader, _ = rayzero.initialize(model=nn.Linear(3, 1), training_data=data)
        assert loader is not None
        return [sample for batch in loader.steps(3) for sample in batch.tolist()]

    assert order(1) == order(1)
    assert order(1) != order(2)
    _, _, loader, _ = rayzero.initialize(
        model=nn.Linear(3, 1), training_data=data, config=CONFIG
    )  # outside a job: seed 0
    assert loader is not None
    assert [sample for batch in loader.steps(3) for sample in batch.tolist()] == order(0)


def engine_leaks(rank: int, world: int, stages: list[int]) -> dict[int, bool]:
    """By stage, whether a closed engine is still referenced."""
    leaks = {}
    for stage in stages:
        model = nn.Linear(4, 2)
        session = RecordingSession(CONFIG | {"zero_optimization": {"stage": stage}})
        with use_session(session):
            engine, *_ = rayzero.initialize(model=model, model_parameters=model.parameters())
            for _ in range(2 // world):
                engine.backward(engine(torch.ones(2, 4)).sum())
                engine.step()
        engine.close()
        reference = weakref.ref(engine)
        del engine, session, model
        gc.collect()
        leaks[stage] = reference() is not None
    return leaks


def test_closed_engine_is_garbage_collected() -> None:
    """A worker creates an engine per generation."""
    stages = [2, 3]
    assert run_ranks(2, engine_leaks, stages, timeout_s=200.0) == [dict.fromkeys(stages, False)] * 2

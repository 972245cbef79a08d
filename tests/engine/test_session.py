"""How a host lends its job to the engine."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from rayzero.engine.session import HostSession, StepRequests, current_session, use_session
from tests.engine.state.blocks import StateSession
from tests.support.ranks import run_ranks

CONFIG = {
    "gradient_clipping": 0,
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
}


class Host(StateSession):
    """Writes down what the engine tells it."""

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


def test_a_session_lasts_as_long_as_its_with() -> None:
    outer: HostSession = Host()
    inner: HostSession = Host()
    assert current_session() is None
    with use_session(outer):
        with use_session(inner):
            assert current_session() is inner
        assert current_session() is outer
    assert current_session() is None
    with pytest.raises(ValueError, match="mistake"), use_session(outer):
        raise ValueError("the user's mistake")
    assert current_session() is None


def test_a_session_is_its_threads_own() -> None:
    seen: list[object] = []
    with use_session(Host()):
        other = threading.Thread(target=lambda: seen.append(current_session()))
        other.start()
        other.join(10)
    assert seen == [None]


def test_the_jobs_config_is_taken_when_the_user_gives_none() -> None:
    with use_session(Host(CONFIG)):
        engine, *_ = rayzero.initialize(model=nn.Linear(3, 1))
        assert engine.settings.batches.global_batch == 4
        engine, *_ = rayzero.initialize(
            model=nn.Linear(3, 1), config=CONFIG | {"train_batch_size": 2}
        )
        assert engine.settings.batches.global_batch == 2
    with use_session(Host(None)):
        engine, *_ = rayzero.initialize(
            model=nn.Linear(3, 1), optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0)
        )
        assert engine.settings.batches.global_batch == 1


def test_the_host_hears_of_the_engine_its_phases_and_its_steps() -> None:
    host = Host(CONFIG)
    with use_session(host):
        engine, *_ = rayzero.initialize(model=nn.Linear(3, 1))
    assert host.engines == [engine]
    for _ in range(2):  # two micro-steps: one step
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
    engine.state_dict()
    micro_step = ["forward", "backward"]
    assert host.phases == [*micro_step, *micro_step, "reduce", "update", "publish", "gather"]
    (metrics,) = host.steps
    assert (metrics["step"], metrics["samples"]) == (1, 4)
    assert metrics == engine.metrics.to_flat_dict()
    assert all(isinstance(value, int | float) for value in metrics.values())


def test_a_skipped_step_is_told_and_updates_nothing() -> None:
    host = Host(CONFIG | {"train_batch_size": 2})
    with use_session(host):
        engine, *_ = rayzero.initialize(model=nn.Linear(3, 1))
    engine.backward(engine(torch.ones(2, 3)).sum() * float("nan"))
    engine.step()
    assert "update" not in host.phases
    assert host.steps[0]["skipped_steps"] == 1


def test_the_data_order_follows_from_the_jobs_seed() -> None:
    data: Any = list(range(50))

    def order(seed: int) -> list[int]:
        with use_session(Host(CONFIG, seed)):
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


def forgets(rank: int, world: int, stages: list[int]) -> dict[int, bool]:
    """Whether anything is left of an engine that its host alone has known, and let go."""
    left = {}
    for stage in stages:
        model = nn.Linear(4, 2)
        host = Host(CONFIG | {"zero_optimization": {"stage": stage}})
        with use_session(host):
            engine, *_ = rayzero.initialize(model=model, model_parameters=model.parameters())
            for _ in range(2 // world):
                engine.backward(engine(torch.ones(2, 4)).sum())
                engine.step()
        engine.close()
        seen = weakref.ref(engine)
        del engine, host, model
        gc.collect()
        left[stage] = seen() is not None
    return left


def test_nothing_keeps_an_engine_that_is_over() -> None:
    """A worker makes one for every generation."""
    stages = [2, 3]
    assert run_ranks(2, forgets, stages, timeout_s=200.0) == [dict.fromkeys(stages, False)] * 2

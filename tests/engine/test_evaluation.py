"""An engine without an optimizer: it evaluates, saves and loads, and says so when it is trained."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.session import HostSession, use_session
from tests.engine import zoo
from tests.support.ranks import run_ranks

SAMPLES = 4
BF16 = {"bf16": {"enabled": True}}
OFFLOADED = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}


def make(stage: int, seed: int, **more: Any) -> rayzero.Engine:
    document = {"train_batch_size": SAMPLES, "zero_optimization": {"stage": stage}, **more}
    return rayzero.initialize(model=zoo.make_model(seed=seed), config=document)[0]


def trained(folder: str) -> dict[str, Tensor]:
    engine = make(2, 0, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    for batch in zoo.batches(2, SAMPLES):
        part = batch.chunk(engine.world_size)[engine.rank]
        engine.backward(engine(part[:, :-1], targets=part[:, 1:])["loss"])
        engine.step()
    engine.save_checkpoint(folder)
    return engine.state_dict()


def evaluates(rank: int, world: int, stage: int, folder: str, more: dict[str, Any]) -> None:
    right = trained(folder)
    plain = zoo.make_model(seed=5)
    dtype = torch.bfloat16 if "bf16" in more else torch.float32
    (batch,) = zoo.batches(1, 2, seed=rank)
    engine = make(stage, 5, **more).eval()
    assert not engine.module.training
    before = engine(batch)["logits"]
    torch.testing.assert_close(before, plain.to(dtype)(batch)["logits"].detach())
    assert not before.requires_grad
    for module_only, step in ((True, 0), (False, 2)):
        path, _ = engine.load_checkpoint(folder, load_module_only=module_only)
        assert path is not None
        assert engine.global_steps == step
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, right[name].to(dtype))
    assert engine.metrics.bytes["main_grads"] == engine.metrics.bytes["optimizer_state"] == 0
    assert engine.get_lr() == engine.get_mom() == []
    _saves(engine, folder)


def _saves(engine: rayzero.Engine, folder: str) -> None:
    """What it saves can be loaded, and trained on."""
    whole = engine.state_dict()
    engine.save_16bit_model(folder)
    if engine.rank == 0:
        read = torch.load(Path(folder, "pytorch_model.bin"))
        assert read.keys() == whole.keys()
        assert all(torch.equal(read[name], whole[name]) for name in whole)
    engine.save_checkpoint(folder, tag="evaluated")
    other = make(1, 9, optimizer={"type": "AdamW", "params": {"lr": 0.25}})
    other.load_checkpoint(folder, tag="evaluated")
    assert other.get_lr() == [0.25]
    seen = other.state_dict()
    assert all(torch.equal(seen[name], whole[name].float()) for name in whole)


@pytest.mark.parametrize("world", [0, 2])
@pytest.mark.parametrize(
    ("stage", "more"), [(0, {}), (1, BF16), (2, {}), (3, BF16), (3, OFFLOADED)]
)
def test_it_evaluates_saves_and_loads(
    stage: int, more: dict[str, Any], world: int, tmp_path: Path
) -> None:
    run_ranks(world, evaluates, stage, str(tmp_path), more)


@pytest.mark.parametrize("stage", [0, 3])
def test_to_train_it_is_an_error_that_says_what_to_give(stage: int) -> None:
    engine, optimizer, loader, scheduler = rayzero.initialize(
        model=nn.Linear(3, 1), config={"zero_optimization": {"stage": stage}}
    )
    assert engine.optimizer is optimizer is loader is scheduler is None
    given = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(EngineError, match=r"backward\(\) was called.*\n?.*no optimizer") as caught:
        engine.backward(engine(given).sum())
    assert "initialize(optimizer=...)" in str(caught.value)
    with pytest.raises(EngineError, match="no optimizer"):
        engine.step()


def test_it_is_said_once_what_was_made(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rayzero.engine"):
        rayzero.initialize(model=nn.Linear(3, 1), config={})
    assert caplog.text.count("only evaluates") == 1


def test_a_schedule_without_an_optimizer_is_a_mistake() -> None:
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 6}}
    for given in ({"config": {"scheduler": section}}, {"lr_scheduler": object(), "config": {}}):
        with pytest.raises(ConfigError, match="no optimizer, but a scheduler"):
            rayzero.initialize(model=nn.Linear(3, 1), **given)


class InJob:
    """As much of a job's session as is asked before the mistake is found."""

    engine_config = None


def test_a_job_trains() -> None:
    session: HostSession = InJob()  # type: ignore[assignment]
    with use_session(session), pytest.raises(ConfigError, match="no optimizer, but a rayzero job"):
        rayzero.initialize(model=nn.Linear(3, 1), config={})

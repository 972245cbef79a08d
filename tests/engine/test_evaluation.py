"""An engine without an optimizer can evaluate, save and load, but not train."""

from __future__ import annotations

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


def make_engine(stage: int, seed: int, **overrides: Any) -> rayzero.Engine:
    document = {"train_batch_size": SAMPLES, "zero_optimization": {"stage": stage}, **overrides}
    return rayzero.initialize(model=zoo.make_model(seed=seed), config=document)[0]


def train_and_save(folder: str) -> dict[str, Tensor]:
    engine = make_engine(2, 0, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    zoo.train(engine, zoo.batches(2, SAMPLES))
    engine.save_checkpoint(folder)
    return engine.state_dict()


def evaluate(rank: int, world: int, stage: int, folder: str, overrides: dict[str, Any]) -> None:
    expected = train_and_save(folder)
    plain = zoo.make_model(seed=5)
    dtype = torch.bfloat16 if "bf16" in overrides else torch.float32
    (batch,) = zoo.batches(1, 2, seed=rank)
    engine = make_engine(stage, 5, **overrides).eval()
    assert not engine.module.training
    before = engine(batch)["logits"]
    torch.testing.assert_close(before, plain.to(dtype)(batch)["logits"].detach())
    assert not before.requires_grad
    for module_only, step in ((True, 0), (False, 2)):
        path, _ = engine.load_checkpoint(folder, load_module_only=module_only)
        assert path is not None
        assert engine.global_steps == step
    buffers = dict(plain.named_buffers())  # they keep their dtype
    for name, value in engine.state_dict().items():
        kept = expected[name] if name in buffers else expected[name].to(dtype)
        torch.testing.assert_close(value, kept)
    assert engine.metrics.bytes["main_grads"] == engine.metrics.bytes["optimizer_state"] == 0
    assert engine.get_lr() == engine.get_mom() == []
    _check_saving(engine, folder)


def _check_saving(engine: rayzero.Engine, folder: str) -> None:
    """Its 16-bit model and its checkpoint can be loaded, the latter for training."""
    state = engine.state_dict()
    engine.save_16bit_model(folder)
    if engine.rank == 0:
        loaded = torch.load(Path(folder, "pytorch_model.bin"))
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[name], state[name]) for name in state)
    engine.save_checkpoint(folder, tag="evaluated")
    other = make_engine(1, 9, optimizer={"type": "AdamW", "params": {"lr": 0.25}})
    other.load_checkpoint(folder, tag="evaluated")
    assert other.get_lr() == [0.25]
    loaded = other.state_dict()
    assert all(torch.equal(loaded[name], state[name].float()) for name in state)


@pytest.mark.parametrize(
    ("stage", "overrides", "world"),
    [(0, {}, 2), (1, BF16, 0), (2, {}, 2), (3, BF16, 2), (3, OFFLOADED, 0), (3, OFFLOADED, 2)],
)
def test_evaluate_save_and_load(
    stage: int, overrides: dict[str, Any], world: int, tmp_path: Path
) -> None:
    run_ranks(world, evaluate, stage, str(tmp_path), overrides)


@pytest.mark.parametrize("stage", [0, 3])
def test_training_requires_an_optimizer(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    engine, optimizer, loader, scheduler = rayzero.initialize(
        model=nn.Linear(3, 1), config={"zero_optimization": {"stage": stage}}
    )
    assert caplog.text.count("only evaluates") == 1
    assert engine.optimizer is optimizer is loader is scheduler is None
    batch = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(EngineError, match=r"backward\(\) was called.*\n?.*no optimizer") as caught:
        engine.backward(engine(batch).sum())
    assert "initialize(optimizer=...)" in str(caught.value)
    with pytest.raises(EngineError, match="no optimizer"):
        engine.step()


def test_a_scheduler_requires_an_optimizer() -> None:
    """Not so a job, whose engines may be built in any order."""

    def build(**arguments: Any) -> Any:
        return rayzero.initialize(model=nn.Linear(3, 1), **arguments)[0]

    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 6}}
    for arguments in ({"config": {"scheduler": section}}, {"lr_scheduler": object(), "config": {}}):
        with pytest.raises(ConfigError, match="no optimizer, but a scheduler"):
            build(**arguments)
    with use_session(HostSession()):
        assert build(config={})(torch.ones(1, 3)).shape == (1, 1)

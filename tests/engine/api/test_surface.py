"""DeepSpeed's engine API: getters, changes of the batch size, unsupported names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.deepspeed.lookup import REFUSED
from rayzero.engine.errors import ConfigError, EngineError

SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def make_engine(model: nn.Module | None = None, **more: Any) -> rayzero.Engine:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0}
    config = {**sizes, "optimizer": SGD, **more}
    return rayzero.initialize(model=model or nn.Linear(3, 1), config=config)[0]


def train_step(engine: rayzero.Engine, value: float = 1.0) -> None:
    engine.backward(engine(torch.full((2, 3), value)).mean())
    engine.step()


def test_getters() -> None:
    engine = make_engine(
        gradient_accumulation_steps=2,
        gradient_clipping=0.5,
        zero_optimization={"stage": 2},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    )
    assert engine.get_global_grad_norm() is None
    train_step(engine)
    assert (engine.global_steps, engine.micro_steps, engine.was_step_applied()) == (0, 1, False)
    assert engine.is_gradient_accumulation_boundary()
    train_step(engine)
    assert (engine.global_steps, engine.micro_steps, engine.was_step_applied()) == (1, 2, True)
    assert engine.get_global_grad_norm() == pytest.approx(2.0)  # three weights and a bias
    assert (engine.global_samples, engine.skipped_steps) == (4, 0)
    assert engine.train_batch_size() == 4
    assert engine.get_batch_info() == (4, 2, 2)
    assert (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()) == (2, 2)
    assert (engine.zero_optimization_stage(), engine.gradient_clipping()) == (2, 0.5)
    assert engine.zero_optimization()
    assert engine.zero_optimization_partition_gradients()
    assert not engine.zero_optimization_partition_weights()
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("SGD", "WarmupLR")
    assert engine.optimizer_params() == SGD["params"]
    assert engine.get_mom() == [0.9]
    assert engine.lr_scheduler is not None
    assert (engine.global_rank, engine.local_rank, engine.dp_world_size) == (0, 0, 1)
    assert engine.training_dataloader is None
    engine.set_lr(0.25)
    assert engine.get_lr() == [0.25]
    for _ in range(2):
        train_step(engine, float("inf"))
    assert (engine.was_step_applied(), engine.skipped_steps, engine.global_steps) == (False, 1, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.generation_config = SimpleNamespace(max_length=3)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.layer(x).mean())

    def generate(self, count: int) -> int:
        return count + 1


def test_attributes_and_output_of_the_model() -> None:
    engine = make_engine(Model())
    assert engine.generation_config.max_length == 3
    assert engine.generate(2) == 3
    assert engine.layer is engine.module.layer
    assert len(list(engine.parameters())) == 2
    assert engine.training
    assert not engine.eval().training
    loss = engine.train().backward(engine(torch.ones(2, 3)))
    engine.step()
    assert engine.metrics.loss == loss.item()
    with pytest.raises(EngineError, match="got a dict"):
        engine.backward({"loss": loss})  # type: ignore[arg-type]


def test_missing_names_suggest_alternatives() -> None:
    engine = make_engine()
    refused = REFUSED["DeepSpeedEngine"]
    assert [name for name in refused if hasattr(engine, name)] == []
    for name, hint in {"half": refused["half"], "gobal_steps": "'global_steps'"}.items():
        with pytest.raises(AttributeError, match=f"{name}.*{hint}"):
            getattr(engine, name)


def test_engine_stays_on_its_device() -> None:
    engine = make_engine()
    assert engine.to("cpu") is engine
    with pytest.raises(EngineError, match="the model is on cpu"):
        engine.to("cuda:0")


def test_batch_size_can_change_between_steps() -> None:
    engine, reference = make_engine(), nn.Linear(3, 1)
    reference.load_state_dict(engine.module.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    train_step(engine)
    engine.set_train_batch_size(6)
    assert engine.get_batch_info() == (6, 2, 3)
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.step()
    with pytest.raises(EngineError, match="in the middle of a step"):
        engine.set_train_batch_size(2)
    for value in (2.0, 3.0):
        engine.backward(engine(torch.full((2, 3), value)).mean())
        engine.zero_grad()  # between backward() and its step() it forgets nothing
        engine.step()
    for values in ([1.0], [1.0, 2.0, 3.0]):
        optimizer.zero_grad()
        torch.stack(
            [reference(torch.full((2, 3), value)).mean() for value in values]
        ).mean().backward()
        optimizer.step()
    torch.testing.assert_close(dict(engine.module.state_dict()), dict(reference.state_dict()))
    assert (engine.global_steps, engine.global_samples) == (2, 8)
    with pytest.raises(ConfigError, match="not a multiple"):
        engine.set_train_batch_size(5)
    engine.set_train_micro_batch_size(3)
    assert engine.get_batch_info() == (9, 3, 3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_that_come_later_are_refused_unless_frozen(stage: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}}
    engine, *_ = rayzero.initialize(model=model, config=config)
    model.frozen = nn.Linear(1, 1).requires_grad_(False)
    values = [param.clone() for param in model.frozen.parameters()]
    x = torch.ones(2, 3)
    assert engine(x).shape == (2, 1)
    engine.save_checkpoint(str(tmp_path))
    engine.load_checkpoint(str(tmp_path))  # they are in no state, and stay as they are
    assert all(map(torch.equal, model.frozen.parameters(), values))
    other, *_ = rayzero.initialize(model=(late := nn.Sequential(nn.Linear(3, 1))), config=config)
    late.head = nn.Linear(1, 1)
    with pytest.raises(EngineError, match=r"had not at `initialize`: head.weight, head.bias"):
        other(x)


def test_names_with_one_value_or_no_effect() -> None:
    engine = make_engine()
    train_step(engine)
    engine.allreduce_gradients()
    engine.empty_partition_cache()
    engine.offload_states(include=["optim_states"])
    engine.reload_states()
    assert engine.losses == engine.metrics.loss
    assert (engine.mpu, engine.has_moe_layers, engine.seq_dp_world_size) == (None, False, 1)
    assert (engine.get_tensor_parallel_rank(), engine.get_sequence_parallel_group()) == (0, None)
    assert engine.client_optimizer is engine.optimizer.optimizer
    assert not engine.inside_no_sync_ctxt


def test_deepspeed_io_loads_for_training_and_for_evaluation() -> None:
    engine = make_engine()
    data = [torch.full((3,), float(number)) for number in range(6)]
    loader = engine.deepspeed_io(data)
    assert sorted(value for batch in loader for value in batch[:, 0].tolist()) == list(range(6))
    ordered = engine.deepspeed_io(data, batch_size=3, route="eval")
    assert [batch[:, 0].tolist() for batch in ordered] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ConfigError, match="the micro-batch of 2"):
        engine.deepspeed_io(data, batch_size=3)


def test_saving_without_a_folder_is_a_value_error() -> None:
    engine = make_engine()
    for folder in (None, ""):
        with pytest.raises(ValueError, match="save_checkpoint"):
            engine.save_checkpoint(folder)

"""What `initialize` takes, where a config may come from, and what it refuses."""

from __future__ import annotations

import argparse
import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from rayzero.engine.errors import ConfigError

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}
# DeepSpeed 0.19's, in its order: scripts pass some of them by position.
ARGUMENTS = (
    *("args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler"),
    *("distributed_port", "mpu", "dist_init_required", "collate_fn", "config", "mesh_param"),
    "config_params",
)


def lr_of(**given: Any) -> float:
    return rayzero.initialize(model=nn.Linear(3, 1), **given)[0].get_lr()[0]


def test_the_signature_is_deepspeeds() -> None:
    assert tuple(inspect.signature(rayzero.initialize).parameters) == ARGUMENTS


def test_a_config_may_stand_in_any_of_its_places(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    args = argparse.Namespace(deepspeed_config=str(path), local_rank=-1)
    assert lr_of(config=CONFIG) == lr_of(config_params=str(path)) == lr_of(args=args) == 0.1
    assert lr_of(args=argparse.Namespace(deepspeed_config=None), config=path) == 0.1
    assert lr_of(args=args, config=CONFIG) == 0.1  # the same one twice


def test_two_different_configs_are_refused() -> None:
    args = argparse.Namespace(deepspeed_config=CONFIG | {"gradient_clipping": 0.5})
    with pytest.raises(ConfigError, match=r"args\.deepspeed_config are different configs"):
        lr_of(args=args, config=CONFIG)


def test_with_no_config_and_no_optimizer_it_is_adamw_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(3, 1)
    right = nn.Linear(3, 1)
    right.load_state_dict(model.state_dict())
    with caplog.at_level(logging.WARNING, "rayzero.engine"):
        engine, optimizer, *_ = rayzero.initialize(model=model, model_parameters=model.parameters())
    assert "AdamW with a learning rate of 1e-3" in caplog.text
    plain = torch.optim.AdamW(right.parameters(), lr=1e-3)
    for step in range(3):
        x = torch.full((4, 3), step + 1.0)
        engine.backward(engine(x).square().mean())
        engine.step()
        plain.zero_grad()
        right(x).square().mean().backward()
        nn.utils.clip_grad_norm_(right.parameters(), 1.0)  # DeepSpeed's default
        plain.step()
    assert isinstance(optimizer, torch.optim.AdamW)
    torch.testing.assert_close(dict(model.state_dict()), dict(right.state_dict()))


@pytest.mark.parametrize("name", ["mpu", "mesh_param"])
def test_refused_arguments_say_why(name: str) -> None:
    with pytest.raises(ConfigError, match="data parallel"):
        lr_of(config=CONFIG, **{name: object()})


def test_a_required_process_group_that_is_missing() -> None:
    with pytest.raises(ConfigError, match="no process group"):
        lr_of(config=CONFIG, dist_init_required=False)
    assert lr_of(config=CONFIG, dist_init_required=True) == 0.1

"""Arguments of `initialize`: the sources of a config, defaults, rejected arguments."""

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


def initialize_and_get_lr(**arguments: Any) -> float:
    return rayzero.initialize(model=nn.Linear(3, 1), **arguments)[0].get_lr()[0]


def test_signature_equals_deepspeed() -> None:
    assert tuple(inspect.signature(rayzero.initialize).parameters) == ARGUMENTS


def test_config_sources(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    args = argparse.Namespace(deepspeed_config=str(path), local_rank=-1)
    assert (
        initialize_and_get_lr(config=CONFIG)
        == initialize_and_get_lr(config_params=str(path))
        == initialize_and_get_lr(args=args)
        == 0.1
    )
    assert initialize_and_get_lr(args=argparse.Namespace(deepspeed_config=None), config=path) == 0.1
    assert initialize_and_get_lr(args=args, config=CONFIG) == 0.1  # equal configs in two places


def test_different_configs_are_rejected() -> None:
    args = argparse.Namespace(deepspeed_config=CONFIG | {"gradient_clipping": 0.5})
    with pytest.raises(ConfigError, match=r"args\.deepspeed_config are different configs"):
        initialize_and_get_lr(args=args, config=CONFIG)


def test_default_optimizer_is_adamw_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(3, 1)
    reference = nn.Linear(3, 1)
    reference.load_state_dict(model.state_dict())
    with caplog.at_level(logging.WARNING, "rayzero.engine"):
        engine, optimizer, *_ = rayzero.initialize(model=model, model_parameters=model.parameters())
    assert "AdamW with a learning rate of 1e-3" in caplog.text
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for step in range(3):
        x = torch.full((4, 3), step + 1.0)
        engine.backward(engine(x).square().mean())
        engine.step()
        reference_optimizer.zero_grad()
        reference(x).square().mean().backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)  # DeepSpeed's default
        reference_optimizer.step()
    assert isinstance(optimizer, torch.optim.AdamW)
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()))


@pytest.mark.parametrize("name", ["mpu", "mesh_param"])
def test_unsupported_arguments(name: str) -> None:
    with pytest.raises(ConfigError, match="data parallel"):
        initialize_and_get_lr(config=CONFIG, **{name: object()})


def test_dist_init_required() -> None:
    with pytest.raises(ConfigError, match="no process group"):
        initialize_and_get_lr(config=CONFIG, dist_init_required=False)
    assert initialize_and_get_lr(config=CONFIG, dist_init_required=True) == 0.1

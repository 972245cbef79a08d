"""DeepSpeed's config object and the engine's getters, against DeepSpeed's own values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from rayzero.deepspeed.config import PATHS, DeepSpeedConfig
from rayzero.deepspeed.runtime_utils import MonitorMaster
from rayzero.engine.errors import ConfigError
from tests.deepspeed.make_config_values import CONFIGS, FILE

ROWS = json.loads(FILE.read_text())


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_values_equal_deepspeeds(number: int) -> None:
    config = DeepSpeedConfig(CONFIGS[number])
    assert len(ROWS[number]) > 30
    assert {name: getattr(config, name) for name in ROWS[number]} == ROWS[number]


def test_engine_reads_its_config() -> None:
    document: dict[str, Any] = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 100,
            "contiguous_gradients": False,
            "offload_optimizer": {"device": "cpu"},
        },
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    engine, *_ = rayzero.initialize(model=nn.Linear(2, 1), config=document)
    config = engine._config
    assert (config.train_batch_size, config.zero_config.stage) == (4, 2)
    assert config.zero_enabled
    assert config.bfloat16_config.enabled
    assert config._param_dict == engine.config
    assert all(getattr(config, name, ...) is not ... for name in PATHS)
    assert engine.zero_reduce_bucket_size() == 100
    assert not engine.zero_contiguous_gradients()
    assert engine.zero_offload_optimizer().device == "cpu"
    assert engine.zero_offload_param() is None
    assert engine.zero_use_cpu_optimizer()
    assert not engine.zero_nvme_offload_optimizer()
    assert engine.get_data_types() == (torch.bfloat16, torch.float32)
    assert engine.communication_data_type is torch.bfloat16
    assert not engine.curriculum_learning_enabled()
    assert engine.checkpoint_tag_validation_enabled()


def test_monitors_of_a_config(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    monitors = DeepSpeedConfig({"csv_monitor": section}).monitor_config
    assert (monitors.enabled, monitors.wandb.enabled) == (True, False)
    MonitorMaster(monitors).write_events([("Train/loss", 0.5, 4), ("Train/lr", 0.1, 8)])
    written = {file.name: file.read_text().split() for file in (tmp_path / "run").iterdir()}
    assert written == {
        "Train_loss.csv": ["step,loss", "4,0.5"],
        "Train_lr.csv": ["step,lr", "8,0.1"],
    }


def test_batch_sizes_and_parallelism_are_checked() -> None:
    sizes = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError, match="batch sizes disagree"):
        DeepSpeedConfig({"train_batch_size": 8} | sizes)
    with pytest.raises(ConfigError, match="all ranks are data parallel"):
        DeepSpeedConfig({}, mpu=object())
    with pytest.raises(AttributeError, match="'zero_config'"):
        _ = DeepSpeedConfig({}).zero_confg

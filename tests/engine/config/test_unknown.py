"""Spellings that libraries pass: dotted keys, enums, keys that DeepSpeed ignores."""

from __future__ import annotations

import enum
import logging
from typing import Any

import pytest
import torch

from rayzero.engine.config import parse_config
from rayzero.engine.config.explain import _warn_once, key_infos, log_explanation
from rayzero.engine.config.parse import parse_with_provenance
from rayzero.engine.errors import ConfigError

BUCKET = "zero_optimization.reduce_bucket_size"


class Device(str, enum.Enum):  # noqa: UP042  as DeepSpeed's OffloadDeviceEnum
    CPU = "cpu"


class Stage(int, enum.Enum):
    WEIGHTS = 3


class Dtype(enum.Enum):
    BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("document", "size"),
    [
        ({BUCKET: 64, "zero_optimization": {"stage": 3}}, 64),
        ({BUCKET: 64, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}, 64),
        ({BUCKET: 64, "zero_optimization": {"stage": 3, "reduce_bucket_size": 32}}, 32),
    ],
)
def test_dotted_keys(document: dict[str, Any], size: int) -> None:
    zero = parse_config(document).zero_optimization
    assert (zero.stage, zero.reduce_bucket_size) == (3, size)


def test_dotted_key_of_an_old_name() -> None:
    config = parse_config({"zero_optimization.prefetch_bucket_size": 7})
    assert config.zero_optimization.stage3_prefetch_bucket_size == 7


def test_enums_stand_for_their_values() -> None:
    config = parse_config(
        {
            "zero_optimization": {"stage": Stage.WEIGHTS, "offload_param": {"device": Device.CPU}},
            "data_types": {"grad_accum_dtype": Dtype.BF16},
            "communication_data_type": torch.float32,
        }
    )
    assert config.zero_optimization.stage == 3
    assert config.zero_optimization.offload_param.device == "cpu"
    assert config.data_types.grad_accum_dtype == "bf16"
    assert config.communication_data_type == "fp32"


def test_unknown_keys_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    _warn_once.cache_clear()
    document = {
        "cuda_visible_devices": "0",
        "fp16_opt_level": "O2",
        "checkpoint": {"zebra": 1},
        "optimizer": {"type": "Adam", "torch_adam": True, "legacy_fusion": "x"},
    }
    parsed = parse_with_provenance(document)
    assert parsed.ignored == ["cuda_visible_devices", "fp16_opt_level", "checkpoint.zebra"]
    with caplog.at_level(logging.WARNING):
        log_explanation(parsed)
    assert "cuda_visible_devices, fp16_opt_level, checkpoint.zebra" in caplog.text
    assert {"cuda_visible_devices", "checkpoint.zebra"} <= {it.key for it in key_infos(parsed)}


@pytest.mark.parametrize(
    "document",
    [
        {"train_batch_sizes": 1},
        {"stage": 2},
        {"zero_optimization": {"zebra": 2}},
        {"rayzero": {"zebra": 2}},
        {"zero_optimization.reduce_bucket_sze": 2},
        {"optimizer": {"type": "Adam", "parms": {}}},
    ],
)
def test_other_unknown_keys_are_errors(document: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        parse_config(document)


def test_leaf_modules_may_be_one_name() -> None:
    leaf = {"classes": "MoeBlock", "name_suffixes": ["mlp"]}
    read = parse_config({"zero_optimization": {"leaf_module": leaf}}).zero_optimization.leaf_module
    assert (read.classes, read.names, read.name_suffixes) == (("MoeBlock",), (), ("mlp",))

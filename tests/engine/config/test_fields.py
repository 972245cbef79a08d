"""Conversion and validation of values as written in real files."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from rayzero.engine.config import parse_config
from rayzero.engine.config.normalize import get_path
from rayzero.engine.errors import ConfigError

BUCKET = "zero_optimization.reduce_bucket_size"


def read(path: str, value: Any) -> Any:
    document: Any = value
    for part in reversed(path.split(".")):
        document = {part: document}
    return get_path(parse_config(document).model_dump(), path)


@pytest.mark.parametrize(
    ("path", "written", "expected"),
    [
        ("train_batch_size", "8", 8),
        ("train_batch_size", " 8 ", 8),
        ("train_batch_size", "8.0", 8),
        ("train_batch_size", 1e3, 1000),
        ("train_batch_size", "1e3", 1000),
        (BUCKET, 5e8, 500_000_000),
        (BUCKET, "5e8", 500_000_000),
        (BUCKET, 15099494.4, 15_099_494),
        (BUCKET, "15099494.4", 15_099_494),
        (BUCKET, float("inf"), sys.maxsize),
        (BUCKET, "Infinity", sys.maxsize),
        ("steps_per_print", float("inf"), sys.maxsize),
        ("gradient_clipping", 1, 1.0),
        ("gradient_clipping", "1e-5", 1e-5),  # as YAML reads it
        ("zero_optimization.stage", "2", 2),
        ("zero_optimization.stage", 2.0, 2),
        ("zero_optimization.overlap_comm", "false", False),
        ("zero_optimization.overlap_comm", 0, False),
        ("zero_optimization.overlap_comm", None, True),
        ("bf16.enabled", "True", True),
    ],
)
def test_values_are_converted(path: str, written: Any, expected: Any) -> None:
    value = read(path, written)
    assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("path", "written"),
    [
        ("train_batch_size", 8.5),
        ("train_batch_size", "inf"),
        ("train_batch_size", float("nan")),
        ("train_batch_size", 10**30),
        ("train_batch_size", 10**400),
        ("train_batch_size", "1" * 5000),
        (BUCKET, 0.5),
        (BUCKET, float("nan")),
        (BUCKET, "nan"),
        (BUCKET, float("-inf")),
        (BUCKET, True),
        ("gradient_clipping", 10**400),
        ("gradient_clipping", "nan"),
        ("zero_optimization.stage", 2.5),
        ("zero_optimization.stage", "True"),
        ("fp16.loss_scale", float("inf")),
        ("zero_optimization.offload_optimizer.ratio", 1.5),
        ("communication_data_type", "int3"),
        ("communication_data_type", 16),
    ],
)
def test_invalid_numbers_are_errors_that_name_the_key(path: str, written: Any) -> None:
    with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
        read(path, written)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"train_batch_size": object()}, "train_batch_size: a object is not allowed in a config"),
        ({"optimizer": {"type": "SGD", "params": {"lr": {1, 2}}}}, r"optimizer\.params\.lr: a set"),
        ({1: 2}, "a key is not text, but a int"),
        ({"zero_optimization": {None: 2}}, "zero_optimization: a key is not text"),
    ],
)
def test_types_outside_json_are_rejected(document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(document)


def test_recursive_config_is_rejected() -> None:
    document: dict[str, Any] = {}
    document["optimizer"] = document
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse_config(document)

"""Keys that contradict each other are told when the config is read, before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from rayzero.engine.config import parse_config
from rayzero.engine.config.keys.table import KEYS
from rayzero.engine.config.together import CLASHES
from rayzero.engine.errors import ConfigError

ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"fp16": True, "bf16": True}, "fp16 and bf16: both are enabled"),
        ({"torch_autocast": True, "bf16": True}, "bf16 and torch_autocast: both are enabled"),
        ({"torch_autocast": {"enabled": True, "dtype": "float"}}, r"dtype: bf16 or fp16"),
        ({ZERO: {"stage": 2, "offload_param": True}}, r"offload_param\.device: .* stage 3 only"),
        ({ZERO: {"stage": 3, "offload_param": {"device": "nvme"}}}, "from the disk twice"),
        ({ZERO: {"offload_optimizer": {"device": "nvme"}}}, r"nvme_path: this key is required"),
    ],
)
def test_a_clash_is_told(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(document)


@pytest.mark.parametrize(
    "document",
    [
        {"fp16": False, "bf16": True, "torch_autocast": {"enabled": False, "dtype": "fp32"}},
        {ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}},
        {ZERO: {"stage": 1, "offload_param": {"device": "none"}}},
        {ZERO: {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}},
    ],
)
def test_what_fits_is_taken(document: dict[str, Any]) -> None:
    parse_config(document)


def test_a_clash_names_keys_that_are_there() -> None:
    for one in CLASHES:
        for path in one.path.split(" and "):
            assert path in KEYS or f"{path}.enabled" in KEYS

"""Old spellings of a config are equivalent to the current ones."""

from __future__ import annotations

from typing import Any

import pytest

from rayzero.engine.config import parse_config
from rayzero.engine.config.model import KEYS
from rayzero.engine.config.normalize import OLD_NAMES, SHORTHANDS, normalize
from rayzero.engine.config.parse import parse_with_provenance
from rayzero.engine.errors import ConfigError

ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"bfloat16": True}, {"bf16": {"enabled": True}}),
        ({"bf16": {"check_overflow": True}}, {"bf16": {"check_grad_overflow": True}}),
        ({"fp16": False}, {"fp16": {"enabled": False}}),
        ({"fp32_allreduce": True}, {"communication_data_type": "fp32"}),
        ({"fp32_allreduce": False}, {}),
        ({ZERO: True}, {ZERO: {"stage": 1}}),
        ({ZERO: False}, {ZERO: {"stage": 0}}),
        (
            {ZERO: True, "allgather_size": 5e8},
            {ZERO: {"stage": 1, "allgather_bucket_size": 5e8}},
        ),
        (
            {ZERO: {"cpu_offload": True}},
            {ZERO: {"offload_optimizer": {"device": "cpu"}}},
        ),
        (
            {ZERO: {"cpu_offload": True, "offload_optimizer": {"ratio": 0.5}}},
            {ZERO: {"offload_optimizer": {"ratio": 0.5, "device": "cpu"}}},
        ),
        ({ZERO: {"cpu_offload": False}}, {ZERO: {}}),
        (
            {ZERO: {"cpu_offload": False, "offload_optimizer": {"device": "cpu"}}},
            {ZERO: {"offload_optimizer": {"device": "cpu"}}},
        ),
        ({ZERO: {"cpu_offload_params": True}}, {ZERO: {"offload_param": {"device": "cpu"}}}),
        ({ZERO: {"cpu_offload_param": True}}, {ZERO: {"offload_param": {"device": "cpu"}}}),
        ({ZERO: {"offload_optimizer": True}}, {ZERO: {"offload_optimizer": {"device": "cpu"}}}),
        ({ZERO: {"offload_param": False}}, {ZERO: {"offload_param": {"device": "none"}}}),
        (
            {ZERO: {"stage3_gather_fp16_weights_on_model_save": True}},
            {ZERO: {"stage3_gather_16bit_weights_on_model_save": True}},
        ),
        (
            {ZERO: {"prefetch_bucket_size": 5}},
            {ZERO: {"stage3_prefetch_bucket_size": 5}},
        ),
    ],
)
def test_old_spellings_are_rewritten(old: dict[str, Any], new: dict[str, Any]) -> None:
    mistakes: list[str] = []
    normalize(old, mistakes)
    assert (old, mistakes) == (new, [])


def test_new_names_are_keys_and_old_names_are_not() -> None:
    for name in OLD_NAMES:
        assert name.old not in KEYS
        assert name.new in KEYS or any(path.startswith(f"{name.new}.") for path in KEYS)
    for path, meanings in SHORTHANDS.items():
        keys = {f"{path}.{key}" for meaning in meanings for key in meaning}
        assert path == "bfloat16" or keys <= KEYS.keys()


def test_conflicting_old_and_new_names_are_an_error() -> None:
    document = {"bfloat16": {"enabled": True}, "bf16": {"enabled": True}}
    assert parse_config(document).bf16.enabled
    with pytest.raises(ConfigError, match=r"prefetch_bucket_size: is the old name of .* disagree"):
        parse_config({ZERO: {"prefetch_bucket_size": 5, "stage3_prefetch_bucket_size": 6}})
    with pytest.raises(ConfigError, match=r"bfloat16: is the old name of bf16, .* disagree"):
        parse_config({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}})
    with pytest.raises(ConfigError, match=r"cpu_offload: true or false was expected"):
        parse_config({ZERO: {"cpu_offload": {"device": "cpu"}}})
    with pytest.raises(
        ConfigError, match=r"cpu_offload: is the old name of .* whose section is no mapping"
    ):
        parse_config({ZERO: {"cpu_offload": True, "offload_optimizer": 3}})


def test_sources_of_values_are_recorded() -> None:
    provenance = parse_with_provenance(
        {"bfloat16": True, ZERO: {"prefetch_bucket_size": 5}}
    ).provenance
    assert provenance == {
        "bf16.enabled": "old name bfloat16",
        "zero_optimization.stage3_prefetch_bucket_size": (
            "old name zero_optimization.prefetch_bucket_size"
        ),
    }
    assert parse_with_provenance({ZERO: True}).provenance == {
        "zero_optimization.stage": "zero_optimization: true"
    }

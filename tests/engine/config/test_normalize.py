"""Old spellings of a config are equivalent to the current ones."""

from __future__ import annotations

from typing import Any

import pytest

from rayzero.engine.config import parse_config
from rayzero.engine.config.normalize import normalize
from rayzero.engine.errors import ConfigError

ZERO = "zero_optimization"


def zero(**section: Any) -> dict[str, Any]:
    return {ZERO: section}


ON_CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"bfloat16": True}, {"bf16": {"enabled": True}}),
        ({"bf16": {"check_overflow": True}}, {"bf16": {"check_grad_overflow": True}}),
        ({"fp16": False}, {"fp16": {"enabled": False}}),
        ({"fp32_allreduce": True}, {"communication_data_type": "fp32"}),
        ({"fp32_allreduce": False}, {}),
        ({ZERO: True}, zero(stage=1)),
        ({ZERO: False}, zero(stage=0)),
        ({ZERO: True, "allgather_size": 5e8}, zero(stage=1, allgather_bucket_size=5e8)),
        (zero(cpu_offload=True), zero(offload_optimizer=ON_CPU)),
        (
            zero(cpu_offload=True, offload_optimizer={"ratio": 0.5}),
            zero(offload_optimizer={"ratio": 0.5} | ON_CPU),
        ),
        (zero(cpu_offload=False), zero()),
        (zero(cpu_offload=False, offload_optimizer=ON_CPU), zero(offload_optimizer=ON_CPU)),
        (zero(cpu_offload_params=True), zero(offload_param=ON_CPU)),
        (zero(cpu_offload_param=True), zero(offload_param=ON_CPU)),
        (zero(offload_optimizer=True), zero(offload_optimizer=ON_CPU)),
        (zero(offload_param=False), zero(offload_param={"device": "none"})),
        (
            zero(stage3_gather_fp16_weights_on_model_save=True),
            zero(stage3_gather_16bit_weights_on_model_save=True),
        ),
        (zero(prefetch_bucket_size=5), zero(stage3_prefetch_bucket_size=5)),
    ],
)
def test_old_spellings_are_rewritten(old: dict[str, Any], new: dict[str, Any]) -> None:
    mistakes: list[str] = []
    normalize(old, mistakes)
    assert (old, mistakes) == (new, [])


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

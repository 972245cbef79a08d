"""Conflicting keys are config errors, raised before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from rayzero.engine.compression.codecs import CODECS
from rayzero.engine.config import EngineConfig, parse_config
from rayzero.engine.config.compression import NEED_ERROR_FEEDBACK
from rayzero.engine.config.explain import log_explanation
from rayzero.engine.config.parse import parse_with_provenance
from rayzero.engine.config.sections import Bf16Config, Fp16Config
from rayzero.engine.errors import ConfigError
from rayzero.engine.session import NO_HOST
from rayzero.engine.settings import resolve_config

ZERO = "zero_optimization"


def bf16(**keys: bool) -> dict[str, Any]:
    return {"bf16": {"enabled": True} | keys}


def compression(*, unused: bool = False, **keys: Any) -> dict[str, Any]:
    section: dict[str, Any] = {"compression": {"gradients": "sign"} | keys}
    return {"rayzero": section | {"unused_gradients": "none"} if unused else section}


def test_codecs_that_need_error_feedback() -> None:
    assert {name for name in CODECS if CODECS[name](None).needs_error_feedback} == {
        *NEED_ERROR_FEEDBACK
    }


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"fp16": True, "bf16": True}, "fp16 and bf16: both are enabled"),
        ({"torch_autocast": {"enabled": True, "dtype": "float"}}, r"dtype: bf16 or fp16"),
        ({ZERO: {"stage": 3, "offload_param": {"device": "nvme"}}}, r"param\.nvme_path: this key"),
        ({ZERO: {"offload_optimizer": {"device": "nvme"}}}, r"nvme_path: this key is required"),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, "grad_accum_dtype: fp32 or bf16 without"),
        ({"fp16": {"enabled": True, "initial_scale_power": -65}}, "power: from -64 to 64"),
        (bf16(bf16_optimizer_states=True), "states: with bf16.bf16_master"),
        (bf16(bf16_master_weights_and_grads=True), "grads: at zero_optimization.stage 1, 2"),
        (
            {ZERO: {"stage": 1}} | bf16(bf16_master_weights_and_grads=True),
            "grads: with bf16.bf16_optimizer_states, or with",
        ),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "min_loss_scale: more than 0"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "loss_scale_window: 1 or more"),
        (
            {"compile": {"deepcompile": True, "passes": ["autosp"]}},
            "compile.passes: refused: AutoSP",
        ),
        ({ZERO: {"stage": 2, "zero_quantized_weights": True}}, "weights: at .* every rank holds"),
        ({ZERO: {"stage": 1, "zero_hpz_partition_size": 2}}, "size: at .* every rank holds all"),
        (
            {ZERO: {"stage": 3, "zero_hpz_partition_size": 2, "offload_param": True}},
            "zero_hpz_partition_size: set together with offload_param",
        ),
        (
            compression() | {"communication_data_type": "fp16"},
            "compression.gradients is sign, communication_data_type is fp16; leave one out",
        ),
        (compression(error_feedback=False), "error_feedback: true, or leave it out: sign does not"),
        (compression(unused=True), 'unused_gradients: "zero" with compressed'),
    ],
)
def test_conflicts_are_errors(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(document)


@pytest.mark.parametrize(
    "document",
    [
        {"fp16": {"enabled": True, "loss_scale": 8, "min_loss_scale": 0, "hysteresis": 0}},
        {"fp16": {"enabled": False, "min_loss_scale": -1, "loss_scale_window": 0}},
        {"torch_autocast": True, "bf16": True},
        {ZERO: {"stage": 2, "offload_param": {"device": "nvme"}}},
        {"dataloader_drop_last": True, "data_types": {"buffer_dtype": "bf16"}},
        {"fp16": False, "bf16": True, "torch_autocast": {"enabled": False, "dtype": "fp32"}},
        {ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}},
        {ZERO: {"stage": 1, "offload_param": {"device": "none"}}},
        {ZERO: {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}},
    ],
)
def test_configs_without_conflict_are_accepted(document: dict[str, Any]) -> None:
    parse_config(document)


def test_what_has_no_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        log_explanation(parse_with_provenance({ZERO: {"stage": 2, "offload_param": True}}))
        compiled = parse_with_provenance({"compile": {"deepcompile": True}})
        log_explanation(compiled)
    assert compiled.config.compile.enabled
    assert "offload_param has no effect at stage 2" in caplog.text
    assert "compile.enabled is True (compile.deepcompile: torch.compile without" in caplog.text


def test_config_objects_are_checked() -> None:
    config_object = EngineConfig(fp16=Fp16Config(enabled=True), bf16=Bf16Config(enabled=True))
    with pytest.raises(ConfigError, match="fp16 and bf16: both are enabled"):
        parse_with_provenance(config_object)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"start_profile_step": 6}, "end_profile_step must not be less than start_profile_step"),
        (
            {
                "min_train_micro_batch_size_per_gpu": 8,
                "max_train_micro_batch_size_per_gpu": 4,
            },
            "max_train_micro_batch_size_per_gpu must be at least 8",
        ),
        ({"metric": "forward"}, r"autotuning\.metric: .*'throughput', 'latency' or 'flops'"),
        ({"enabled": True, "mp_size": 2}, r"autotuning\.mp_size: refused: all ranks are data-par"),
        ({"tuner_typ": "random"}, "tuner_type"),
    ],
)
def test_autotuning_section_is_checked(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"autotuning": section})


def test_enabled_autotuning_warns_where_nothing_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    document = {"autotuning": {"enabled": True}, "optimizer": {"type": "SGD"}}
    resolve_config(document, None, None, NO_HOST)
    assert "rayzero launch --autotuning run" in caplog.text

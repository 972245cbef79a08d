"""Checks of a config: refused keys, and keys that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rayzero.engine.config.compression import find_compression_conflicts
from rayzero.engine.config.data_efficiency import find_schedule_errors
from rayzero.engine.config.keys import REFUSED, is_set
from rayzero.engine.config.model import KEYS, EngineConfig
from rayzero.engine.config.normalize import get_path
from rayzero.engine.validation import repr_value

_MAX_SCALE_POWER = 64  # far beyond the range of useful loss scales

DEFAULTS = EngineConfig().model_dump(mode="json")


def find_refused(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for every refused key whose value requests something."""
    for key in KEYS.values():
        if key.status is REFUSED and is_in_force(document, key.path):
            value = get_path(document, key.path)
            if key.requests(value, get_path(DEFAULTS, key.path)):
                use = f"; use {key.alternative}" if key.alternative else ""
                yield f"{key.path}: refused: {key.reason}{use} (seen: {repr_value(value)})"


def is_in_force(document: Mapping[str, Any], path: str) -> bool:
    """Returns whether a key can have an effect: its section is present, and has neither
    `enabled: false` nor `device: none`, unless the key does not depend on these."""
    outer, _, last = path.rpartition(".")
    section = get_path(document, outer) if outer else document
    if not isinstance(section, Mapping):
        return False
    default = get_path(DEFAULTS, outer) if outer else {}
    settings = {**(default or {}), **section}
    on = is_set(settings.get("enabled", True)) and settings.get("device") != "none"
    return last in ("enabled", "device", "deepcompile", "autoep_non_moe") or on


def find_without_effect(config: EngineConfig) -> Iterator[str]:
    """Yields a line for every setting that has no effect, here as in DeepSpeed, because of the
    values of other keys."""
    zero = config.zero_optimization
    if zero.offload_param.device != "none" and zero.stage != 3:
        yield (
            f"zero_optimization.offload_param has no effect at stage {zero.stage}, as in "
            "DeepSpeed: weights are offloaded at stage 3 only, since other stages use all weights "
            "all the time"
        )


def find_conflicts(config: EngineConfig) -> Iterator[str]:
    """Yields a line for every contradiction between keys of a config: how to resolve it."""
    zero = config.zero_optimization
    fp16 = config.fp16
    autocast = config.torch_autocast
    if fp16.enabled and config.bf16.enabled:
        yield 'fp16 and bf16: both are enabled; set "enabled": false in one of them'
    if autocast.enabled and autocast.dtype == "fp32":
        yield 'torch_autocast.dtype: bf16 or fp16; for fp32 "torch_autocast": false'
    if config.data_types.grad_accum_dtype == "fp16" and not fp16.enabled:
        yield (
            "data_types.grad_accum_dtype: fp32 or bf16 without fp16.enabled: without a loss scale "
            "gradients below 6e-8 would vanish"
        )
    yield from _find_bf16_conflicts(config)
    yield from find_compression_conflicts(config)
    yield from find_schedule_errors(config.curriculum_learning, config.data_efficiency)
    if config.gradient_allreduce_op == "sum" and zero.stage == 3:
        yield "gradient_allreduce_op: mean at stage 3, as in DeepSpeed"
    if fp16.enabled and not fp16.loss_scale:  # the scale is dynamic
        if abs(fp16.initial_scale_power) > _MAX_SCALE_POWER:
            yield (
                f"fp16.initial_scale_power: from {-_MAX_SCALE_POWER} to {_MAX_SCALE_POWER}: it is "
                "an exponent of 2"
            )
        if fp16.min_loss_scale <= 0:
            yield "fp16.min_loss_scale: more than 0: halving a scale never reaches 0"
        for key in ("loss_scale_window", "hysteresis"):
            if getattr(fp16, key) < 1:
                yield f"fp16.{key}: 1 or more: it counts steps (seen: {getattr(fp16, key)})"
    if not config.rayzero.reduce_each_micro_step:
        micro_steps = config.gradient_accumulation_steps
        if zero.stage < 2 or micro_steps == 1:
            seen = "micro-step" if zero.stage >= 2 else f"reduction a step at stage {zero.stage}"
            yield f"rayzero.reduce_each_micro_step: true, or leave it out: there is one {seen}"
    for section in ("offload_optimizer", "offload_param"):
        settings, path = getattr(zero, section), f"zero_optimization.{section}"
        is_used = section == "offload_optimizer" or zero.stage == 3
        if is_used and settings.device == "nvme" and not settings.nvme_path:
            yield (
                f"{path}.nvme_path: this key is required with {path}.device nvme: a folder on a "
                "local disk"
            )


def _find_bf16_conflicts(config: EngineConfig) -> Iterator[str]:
    """Yields a line where DeepSpeed's conditions for bfloat16 main weights and optimizer state are
    not met."""
    bf16, zero = config.bf16, config.zero_optimization
    if not bf16.enabled:
        return
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        yield "bf16.bf16_optimizer_states: with bf16.bf16_master_weights_and_grads only"
    elif bf16.bf16_master_weights_and_grads and zero.stage == 0:
        yield "bf16.bf16_master_weights_and_grads: at zero_optimization.stage 1, 2 or 3"
    elif (
        bf16.bf16_master_weights_and_grads
        and not bf16.bf16_optimizer_states
        and zero.offload_optimizer.device == "none"
    ):
        yield (
            "bf16.bf16_master_weights_and_grads: with bf16.bf16_optimizer_states, or with "
            "zero_optimization.offload_optimizer, which updates in fp32 unit by unit"
        )

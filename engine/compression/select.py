"""Builds the compression that a config selects."""

from __future__ import annotations

import logging

from rayzero.engine.compression.codecs import CODECS, Codec, SignCodec
from rayzero.engine.compression.gradients import (
    OneBitAdamReduction,
    PowerSGDReduction,
    QuantizedReduction,
)
from rayzero.engine.compression.weights import HpzGather, QuantizedGather
from rayzero.engine.config import EngineConfig
from rayzero.engine.config.optimizers import ONEBIT_OPTIMIZERS
from rayzero.engine.errors import ConfigError
from rayzero.engine.zero.build import BuildContext
from rayzero.engine.zero.parameters import WeightGather
from rayzero.engine.zero.reducer import GradReduction

log = logging.getLogger("rayzero.engine")


def make_grad_reduction(
    config: EngineConfig, context: BuildContext, factor: float
) -> GradReduction:
    """The gradient reduction that a config selects; reduced gradients are still to be multiplied by
    `factor`, before loss scaling. Raises ConfigError as `check_compression`."""
    check_compression(config)
    name, section = _gradient_codec_name(config), config.rayzero.compression
    collectives, device = context.collectives, context.device
    factor /= context.precision.scaler.value
    if _is_onebit_adam(config):
        codec: Codec = SignCodec(section.block_size or 128)
        return OneBitAdamReduction(codec, collectives, device, factor=factor)
    if name == "none":
        return GradReduction(collectives, factor)
    if name == "lowrank":
        return PowerSGDReduction(section.rank, collectives, device, factor=factor)
    codec, feedback = CODECS[name](section.block_size), section.error_feedback
    if feedback is None:
        feedback = codec.needs_error_feedback
    return QuantizedReduction(codec, collectives, device, feedback=feedback, factor=factor)


def make_weight_gather(config: EngineConfig, context: BuildContext) -> WeightGather:
    """The all-gather of sharded weights that a config selects. Raises ConfigError if the hpZ groups
    do not divide the world size."""
    collectives, device = context.collectives, context.device
    zero, section = config.zero_optimization, config.rayzero.compression
    gather = WeightGather(collectives)
    if zero.zero_quantized_weights:
        gather = QuantizedGather(CODECS["int8"](section.block_size), collectives, device)
    size = hpz_group_size(
        zero.zero_hpz_partition_size, collectives.world_size, elastic=context.elastic
    )
    return gather if size == 1 else HpzGather(gather, collectives, size, device)


def hpz_group_size(size: int, world_size: int, *, elastic: bool) -> int:
    """Ranks per secondary partition (ZeRO++ hpZ); 1 for none. Raises ConfigError if the size does
    not divide the world size.

    Args:
        size: `zero_hpz_partition_size`; 0 or 1 for none.
        elastic: the world size may change, so the next smaller size that divides it is used, with
            a warning.
    """
    allowed = [divisor for divisor in range(1, world_size + 1) if world_size % divisor == 0]
    if size <= 1 or size in allowed:
        return max(size, 1)
    if not elastic:
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size is {size} on {world_size} ranks",
            allowed=f"what divides the world size: {', '.join(map(str, allowed))}",
        )
    used = max(divisor for divisor in allowed if divisor < size)
    log.warning(
        "zero_hpz_partition_size %d does not divide the world size %d: %d is used until that "
        "changes",
        size,
        world_size,
        used,
    )
    return used


def check_compression(config: EngineConfig) -> None:
    """Refuses what the selected compression cannot do. Raises ConfigError if two keys contradict
    each other, or the combination is not supported."""
    _check_weight_compression(config)
    name, section = _gradient_codec_name(config), config.rayzero.compression
    if _is_onebit_adam(config):
        _check_onebit_adam(config, name)
    elif (
        name in CODECS
        and section.error_feedback is False
        and CODECS[name](section.block_size).needs_error_feedback
    ):
        raise ConfigError(
            f"rayzero.compression: error_feedback is false with {name!r}, which does not converge "
            "without it",
            allowed="true, or leave it out",
        )


def _check_weight_compression(config: EngineConfig) -> None:
    """Refuses compression of weights where they are not sharded."""
    zero = config.zero_optimization
    set_keys = ["zero_quantized_weights"] * zero.zero_quantized_weights
    set_keys += ["zero_hpz_partition_size"] * (zero.zero_hpz_partition_size > 1)
    for key in set_keys:
        if zero.stage != 3:
            raise ConfigError(
                f"zero_optimization.{key} is set at stage {zero.stage}, where every rank holds all "
                "weights",
                allowed="stage 3, where weights are sharded",
                fix="zero_optimization.stage, or leave it out",
            )
        if zero.offload_param.device != "none":
            raise ConfigError(
                f"zero_optimization.{key} is set together with offload_param",
                allowed="one of the two",
            )


def _is_onebit_adam(config: EngineConfig) -> bool:
    return config.optimizer is not None and config.optimizer.type in ONEBIT_OPTIMIZERS


def _gradient_codec_name(config: EngineConfig) -> str:
    """The name of the gradient compression, from whichever key selects it."""
    zero = config.zero_optimization
    settings = {
        "rayzero.compression.gradients": config.rayzero.compression.gradients,
        "communication_data_type": config.communication_data_type or "none",
        "zero_optimization.zero_quantized_gradients": (
            "int8" if zero.zero_quantized_gradients else "none"
        ),
    }
    chosen = {key: name for key, name in settings.items() if name != "none"}
    if len(set(chosen.values())) > 1:
        seen = ", ".join(f"{key} is {name}" for key, name in chosen.items())
        raise ConfigError(f"two gradient compressions are set: {seen}", fix="leave one out")
    return next(iter(chosen.values()), "none")


def _check_onebit_adam(config: EngineConfig, name: str) -> None:
    """Refuses optimizers of reduced momenta together with settings that they cannot support."""
    stage, clip = config.zero_optimization.stage, config.gradient_clipping
    kind = "" if config.optimizer is None else config.optimizer.type
    if stage != 0:
        raise ConfigError(
            f"optimizer.type is {kind} at zero_optimization.stage {stage}: each rank "
            "must hold the momentum of all weights, and at this stage holds only its shard",
            allowed="stage 0",
            fix='"rayzero": {"compression": {"gradients": "sign"}} with AdamW, at any stage',
        )
    if clip:
        raise ConfigError(
            f"optimizer.type is {kind} and gradient_clipping is {clip:g}: after its warm-up "
            "momenta are communicated instead of gradients, whose norm is then unknown",
            allowed="gradient_clipping 0, set explicitly: the default is 1",
            fix='"rayzero": {"compression": {"gradients": "sign"}} with AdamW, which clips',
        )
    if name != "none":
        raise ConfigError(
            f"optimizer.type is {kind}, which has its own compression, and gradients are "
            f"compressed as {name}",
            fix="leave one out",
        )

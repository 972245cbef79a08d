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
from rayzero.engine.config.compression import is_onebit, selected_codecs
from rayzero.engine.errors import ConfigError
from rayzero.engine.zero.build_context import BuildContext
from rayzero.engine.zero.parameters import WeightGather
from rayzero.engine.zero.reducer import GradReduction

log = logging.getLogger("rayzero.engine")


def make_grad_reduction(
    config: EngineConfig, context: BuildContext, factor: float
) -> GradReduction:
    """The gradient reduction that a config selects; reduced gradients are still to be multiplied by
    `factor`, before loss scaling."""
    name = next(iter(selected_codecs(config).values()), "none")
    section = config.rayzero.compression
    collectives, device = context.collectives, context.device
    factor /= context.precision.scaler.value
    if is_onebit(config):
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

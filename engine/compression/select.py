"""The factory's part about compression: what a config asks for, as objects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from rayzero.engine.compression.codecs import CastCodec, Codec, Int8Codec, SignCodec
from rayzero.engine.compression.gradients import (
    PlainReduction,
    PowerSGDReduction,
    QuantizedReduction,
)
from rayzero.engine.compression.onebit_adam import OneBitAdamReduction
from rayzero.engine.compression.weights import HpzGather, PlainGather, QuantizedGather
from rayzero.engine.config import EngineConfig
from rayzero.engine.config.sections import CompressionConfig
from rayzero.engine.errors import ConfigError
from rayzero.engine.zero.build import BuildContext
from rayzero.engine.zero.parameters import WeightGather
from rayzero.engine.zero.reducer import GradReduction

CODEC_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


log = logging.getLogger("rayzero.engine")


GRADIENTS_KEY = "rayzero.compression.gradients"

_CODEC_FACTORIES: Mapping[str, Callable[[CompressionConfig], Codec]] = {
    "fp32": lambda _: CastCodec("fp32", torch.float32),
    "fp16": lambda _: CastCodec("fp16", torch.float16),
    "bf16": lambda _: CastCodec("bf16", torch.bfloat16),
    "int8": lambda config: Int8Codec(config.block_size or 256),
    "sign": lambda config: SignCodec(config.block_size or 64),
}


@dataclass(frozen=True)
class GradientCompression:
    """How a config lets gradients travel.

    Attributes:
        codec: None where they travel as they are, or as `rank` factors.
        rank: of low-rank factors; 0 for none.
        feedback: whether what is lost comes back with the next gradients.
        one_bit: momenta travel, as 1-bit Adam's.
    """

    codec: Codec | None = None
    rank: int = 0
    feedback: bool = False
    one_bit: bool = False


def resolve_compression(config: EngineConfig) -> GradientCompression:
    """What a config asks for.

    Raises:
        ConfigError: two keys ask for different things, or what is asked for cannot be had.
    """
    check_weight_compression(config)
    name, section = _gradient_codec_name(config), config.rayzero.compression
    if config.optimizer is not None and config.optimizer.type == "OneBitAdam":
        _check_onebit_adam(config, name)
        return GradientCompression(
            SignCodec(section.block_size or 128), feedback=True, one_bit=True
        )
    if name == "none":
        return GradientCompression()
    if name == "lowrank":
        return GradientCompression(rank=section.rank, feedback=True)
    codec = _CODEC_FACTORIES[name](section)
    feedback = (
        codec.needs_error_feedback if section.error_feedback is None else section.error_feedback
    )
    if codec.needs_error_feedback and not feedback:
        raise ConfigError(
            f"rayzero.compression: error_feedback is false with {name!r}, which loses most of "
            "every gradient",
            allowed="true, or leave it out",
        )
    return GradientCompression(codec, feedback=feedback)


def make_grad_reduction(
    config: EngineConfig, context: BuildContext, factor: float
) -> GradReduction:
    """How gradients travel.

    Args:
        factor: what summed gradients are still to be multiplied by, but for the loss scale.

    Raises:
        ConfigError: as `compression_of`.
    """
    asked, collectives, device = resolve_compression(config), context.collectives, context.device
    factor /= context.precision.scaler.value
    if asked.rank:
        return PowerSGDReduction(asked.rank, collectives, device, factor=factor)
    if asked.codec is None:
        return PlainReduction(collectives)
    if asked.one_bit:
        return OneBitAdamReduction(asked.codec, collectives, device, factor=factor)
    return QuantizedReduction(
        asked.codec, collectives, device, feedback=asked.feedback, factor=factor
    )


def make_weight_gather(config: EngineConfig, context: BuildContext) -> WeightGather:
    """How sharded weights travel.

    Raises:
        ConfigError: the groups of ranks are not of one size.
    """
    collectives, device = context.collectives, context.device
    zero, section = config.zero_optimization, config.rayzero.compression
    way: WeightGather = PlainGather(collectives)
    if zero.zero_quantized_weights:
        way = QuantizedGather(weight_codec(section), collectives, device)
    size = hpz_group_size(
        zero.zero_hpz_partition_size, collectives.world_size, elastic=context.elastic
    )
    return way if size == 1 else HpzGather(way, collectives, size, device)


def weight_codec(section: CompressionConfig) -> Codec:
    """What `zero_quantized_weights` makes of weights on the wire."""
    return Int8Codec(section.block_size or 256)


def hpz_group_size(asked: int, world_size: int, *, elastic: bool) -> int:
    """Ranks in a group that keeps weights a second time; 1 for none.

    Args:
        asked: 0 or 1 for none.
        elastic: the world is not the user's to choose, and may change: then the next smaller
            size that divides it is taken, and said.

    Raises:
        ConfigError: groups of that size do not make up the world.
    """
    allowed = [size for size in range(1, world_size + 1) if world_size % size == 0]
    if asked <= 1 or asked in allowed:
        return max(asked, 1)
    if not elastic:
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size is {asked} on {world_size} ranks",
            allowed=f"what divides the world size: {', '.join(map(str, allowed))}",
        )
    taken = max(size for size in allowed if size < asked)
    log.warning(
        "zero_hpz_partition_size %d does not divide the world size %d: %d is used until that "
        "changes",
        asked,
        world_size,
        taken,
    )
    return taken


def check_weight_compression(config: EngineConfig) -> None:
    """Refuses compression of weights where they do not travel sharded.

    Raises:
        ConfigError: naming the key.
    """
    zero = config.zero_optimization
    asked = {
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
    }
    for key in [key for key, on in asked.items() if on]:
        if zero.stage != 3:
            raise ConfigError(
                f"zero_optimization.{key} is set at stage {zero.stage}, where every rank has all "
                "weights",
                allowed="stage 3, where they are gathered before use",
                fix="zero_optimization.stage, or leave it out",
            )
        if zero.offload_param.device != "none":
            raise ConfigError(
                f"zero_optimization.{key} is set together with offload_param",
                allowed="one of them in this version",
            )


def _gradient_codec_name(config: EngineConfig) -> str:
    """The compression of gradients that all keys agree on."""
    zero = config.zero_optimization
    asked = {
        GRADIENTS_KEY: config.rayzero.compression.gradients,
        "communication_data_type": config.communication_data_type or "none",
        "zero_optimization.zero_quantized_gradients": (
            "int8" if zero.zero_quantized_gradients else "none"
        ),
    }
    wishes = {key: value for key, value in asked.items() if value != "none"}
    if len(set(wishes.values())) > 1:
        told = ", ".join(f"{key} asks for {value}" for key, value in wishes.items())
        raise ConfigError(f"gradients can travel in one way only: {told}", fix="leave one out")
    return next(iter(wishes.values()), "none")


def _check_onebit_adam(config: EngineConfig, name: str) -> None:
    """Raises ConfigError: 1-bit Adam cannot be used with something else in the config."""
    stage, clip = config.zero_optimization.stage, config.gradient_clipping
    if stage != 0:
        raise ConfigError(
            f"optimizer.type is OneBitAdam at zero_optimization.stage {stage}: each rank "
            "compresses the momentum of all weights, and here has its shard of it only",
            allowed="stage 0",
            fix='"rayzero": {"compression": {"gradients": "sign"}} with AdamW, at any stage',
        )
    if clip:
        raise ConfigError(
            f"optimizer.type is OneBitAdam and gradient_clipping is {clip:g}: after its warm-up "
            "momenta travel, and the gradient's norm is not known",
            allowed="gradient_clipping 0, which is to be said: the default is 1",
            fix='"rayzero": {"compression": {"gradients": "sign"}} with AdamW, which clips',
        )
    if name != "none":
        raise ConfigError(
            "optimizer.type is OneBitAdam, which compresses by itself, and gradients are to "
            f"travel as {name}",
            fix="leave one out",
        )

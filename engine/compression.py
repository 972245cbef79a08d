"""The factory's part about compression: what a config asks for, as objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rayzero.engine.comm.codecs.cast import CastCodec
from rayzero.engine.comm.codecs.codec import Codec
from rayzero.engine.comm.codecs.int8 import Int8Codec
from rayzero.engine.comm.codecs.sign import SignCodec
from rayzero.engine.config import EngineConfig
from rayzero.engine.config.compression import CompressionConfig
from rayzero.engine.errors import ConfigError
from rayzero.engine.zero.build import Recipe
from rayzero.engine.zero.ways import CodedWay, GradientWay, PlainWay

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KEY = "rayzero.compression.gradients"

_CODECS: Mapping[str, Callable[[CompressionConfig], Codec]] = {
    "fp32": lambda _: CastCodec("fp32", torch.float32),
    "fp16": lambda _: CastCodec("fp16", torch.float16),
    "bf16": lambda _: CastCodec("bf16", torch.bfloat16),
    "int8": lambda config: Int8Codec(config.block_size or 256),
    "sign": lambda config: SignCodec(config.block_size or 2048),
}


def make_way(config: EngineConfig, recipe: Recipe, factor: float) -> GradientWay:
    """How gradients travel.

    Args:
        factor: what summed gradients are still to be multiplied by.

    Raises:
        ConfigError: two keys ask for different things, or what is asked for cannot be used here.
    """
    name = _asked(config)
    if name == "none":
        return PlainWay(recipe.collectives)
    section = config.rayzero.compression
    codec = _CODECS[name](section)
    feedback = codec.needs_feedback if section.error_feedback is None else section.error_feedback
    if codec.needs_feedback and not feedback:
        raise ConfigError(
            f"rayzero.compression: error_feedback is false with {name!r}, which loses most of "
            "every gradient",
            allowed="true, or leave it out",
        )
    if feedback:
        refuse_feedback(config, name)
    return CodedWay(codec, recipe.collectives, recipe.device, feedback=feedback, factor=factor)


def _asked(config: EngineConfig) -> str:
    """The compression of gradients that all keys agree on."""
    zero = config.zero_optimization
    asked = {
        KEY: config.rayzero.compression.gradients,
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


def refuse_feedback(config: EngineConfig, name: str) -> None:
    """Error feedback carries part of a gradient into later steps, which has to have one scale."""
    autocast = config.torch_autocast
    if config.fp16.enabled or (autocast.enabled and autocast.dtype == "fp16"):
        raise ConfigError(
            f"{KEY}: {name!r} keeps what it loses for later steps, and fp16 scales the loss of "
            "each step differently",
            allowed="bf16, or no mixed precision; with fp16: int8, or fp16 on the wire",
        )

"""The compression that a config selects, and conflicts with other keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rayzero.engine.config.optimizers import ONEBIT_OPTIMIZERS

if TYPE_CHECKING:
    from rayzero.engine.config.model import EngineConfig

NEED_ERROR_FEEDBACK = {"sign"}
"""Codecs with which training converges only if the encoding error is added to the next values."""


def selected_codecs(config: EngineConfig) -> dict[str, str]:
    """Returns {key: codec} for every key that selects a compression of gradients."""
    codecs = {
        "rayzero.compression.gradients": config.rayzero.compression.gradients,
        "communication_data_type": config.communication_data_type or "none",
        "zero_optimization.zero_quantized_gradients": (
            "int8" if config.zero_optimization.zero_quantized_gradients else "none"
        ),
    }
    return {key: name for key, name in codecs.items() if name != "none"}


def is_onebit(config: EngineConfig) -> bool:
    """Returns whether the config's optimizer reduces momenta as signs."""
    return config.optimizer is not None and config.optimizer.type in ONEBIT_OPTIMIZERS


def find_compression_conflicts(config: EngineConfig) -> Iterator[str]:
    """Yields a line for every contradiction between compression and other keys: how to resolve
    it."""
    codecs = selected_codecs(config)
    seen = ", ".join(f"{key} is {name}" for key, name in codecs.items())
    if len({*codecs.values()}) > 1:
        yield f"two gradient compressions are set: {seen}; leave one out"
    elif is_onebit(config):
        yield from _find_onebit_conflicts(config, seen)
    elif config.rayzero.compression.error_feedback is False:
        for name in {*codecs.values()} & NEED_ERROR_FEEDBACK:
            yield (
                f"rayzero.compression.error_feedback: true, or leave it out: {name} does not "
                "converge without it"
            )
    if config.rayzero.unused_gradients == "none" and (codecs or is_onebit(config)):
        yield (
            'rayzero.unused_gradients: "zero" with compressed gradients: their update is not '
            "elementwise"
        )
    yield from _find_weight_conflicts(config)


def _find_weight_conflicts(config: EngineConfig) -> Iterator[str]:
    zero = config.zero_optimization
    keys = list[str]()
    if zero.zero_quantized_weights:
        keys.append("zero_quantized_weights")
    if zero.zero_hpz_partition_size > 1:
        keys.append("zero_hpz_partition_size")
    for key in keys:
        path = f"zero_optimization.{key}"
        if zero.stage != 3:
            yield (
                f"{path}: at zero_optimization.stage 3, where weights are sharded, or leave it "
                f"out: at stage {zero.stage} every rank holds all weights"
            )
        elif zero.offload_param.device != "none":
            yield f"{path}: set together with offload_param; leave one of the two out"


def _find_onebit_conflicts(config: EngineConfig, codecs: str) -> Iterator[str]:
    kind = "" if config.optimizer is None else config.optimizer.type
    stage = config.zero_optimization.stage
    instead = '"rayzero": {"compression": {"gradients": "sign"}} with AdamW'
    if stage != 0:
        yield (
            f"zero_optimization.stage: 0 with optimizer.type {kind}: each rank must hold the "
            f"momentum of all weights, and at stage {stage} holds only its shard; {instead} works "
            "at any stage"
        )
    if codecs:
        yield f"optimizer.type: {kind} has its own compression, and {codecs}; leave one out"

"""Checks of a config: refused keys, and keys that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, starmap
from typing import Any

from rayzero.engine.config.keys import REFUSED, Key, is_set
from rayzero.engine.config.model import KEYS, EngineConfig
from rayzero.engine.config.normalize import get_path
from rayzero.engine.validation import repr_value

DEFAULTS = EngineConfig().model_dump(mode="json")


def find_refused(document: Mapping[str, Any]) -> Iterator[str]:
    """A line for every refused key whose value requests something."""
    for key in KEYS.values():
        if key.status is REFUSED and is_in_force(document, key.path):
            value = get_path(document, key.path)
            if _requests_something(key, value):
                use = f"; use {key.alternative}" if key.alternative else ""
                seen = repr_value(value)
                yield f"{key.path}: refused: {key.reason}{use} (seen: {seen})"


def _requests_something(key: Key, value: Any) -> bool:
    if key.is_active is not None:
        return key.is_active(value)
    return is_set(value) and value != get_path(DEFAULTS, key.path)


def is_in_force(document: Mapping[str, Any], path: str) -> bool:
    """Whether the key's section is present, not `enabled: false` and not `device: none`."""
    outer, _, last = path.rpartition(".")
    section = get_path(document, outer) if outer else document
    if not isinstance(section, Mapping):
        return False
    default = get_path(DEFAULTS, outer) if outer else {}
    settings = {**(default or {}), **section}
    on = is_set(settings.get("enabled", True)) and settings.get("device") != "none"
    return last in ("enabled", "device") or on


@dataclass(frozen=True)
class Conflict:
    """Keys that contradict each other.

    Attributes:
        path: the key, or both keys, as the message names them.
        applies_to: whether a config has this conflict.
        message: what is wrong, and what to change.
    """

    path: str
    applies_to: Callable[[EngineConfig], bool]
    message: str


def _both_enabled(first: str, second: str) -> Conflict:
    return Conflict(
        f"{first} and {second}",
        lambda config: getattr(config, first).enabled and getattr(config, second).enabled,
        'both are enabled; "enabled": false in one of them',
    )


_MAX_SCALE_POWER = 64  # far beyond the range of useful loss scales


def _uses_dynamic_scale(config: EngineConfig) -> bool:
    return config.fp16.enabled and not config.fp16.loss_scale


_OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer"
_OFFLOAD_PARAM = "zero_optimization.offload_param"


CONFLICTS = (
    *starmap(_both_enabled, combinations(("fp16", "bf16", "torch_autocast"), 2)),
    Conflict(
        "torch_autocast.dtype",
        lambda config: config.torch_autocast.enabled and config.torch_autocast.dtype == "fp32",
        'bf16 or fp16; for fp32 "torch_autocast": false',
    ),
    Conflict(
        "data_types.grad_accum_dtype",
        lambda config: config.data_types.grad_accum_dtype == "fp16" and not config.fp16.enabled,
        "fp32 or bf16 without fp16.enabled: without a loss scale gradients below 6e-8 would vanish",
    ),
    Conflict(
        "fp16.initial_scale_power",
        lambda config: (
            _uses_dynamic_scale(config) and abs(config.fp16.initial_scale_power) > _MAX_SCALE_POWER
        ),
        f"from {-_MAX_SCALE_POWER} to {_MAX_SCALE_POWER}: it is an exponent of 2",
    ),
    Conflict(
        "fp16.min_loss_scale",
        lambda config: _uses_dynamic_scale(config) and not config.fp16.min_loss_scale,
        "more than 0: halving a scale never reaches 0",
    ),
    Conflict(
        f"{_OFFLOAD_PARAM}.device",
        lambda config: (
            config.zero_optimization.offload_param.device == "cpu"
            and config.zero_optimization.stage != 3
        ),
        "model weights can be offloaded at stage 3 only; others use all of them all the time",
    ),
    Conflict(
        f"{_OFFLOAD_PARAM}.device",
        lambda config: config.zero_optimization.offload_param.device == "nvme",
        "refused: every unit would be read from disk twice per micro-step; use cpu, and "
        f"{_OFFLOAD_OPTIMIZER}.device nvme for main weights and optimizer state",
    ),
    Conflict(
        f"{_OFFLOAD_OPTIMIZER}.nvme_path",
        lambda config: (
            config.zero_optimization.offload_optimizer.device == "nvme"
            and not config.zero_optimization.offload_optimizer.nvme_path
        ),
        f"this key is required with {_OFFLOAD_OPTIMIZER}.device nvme: a folder on a local disk",
    ),
)


def find_conflicts(config: EngineConfig) -> Iterator[str]:
    """A line for every conflict in a config."""
    for conflict in CONFLICTS:
        if conflict.applies_to(config):
            yield f"{conflict.path}: {conflict.message}"

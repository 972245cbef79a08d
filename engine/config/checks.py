"""Checks of a document against the table of keys: unknown, refused and conflicting keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, starmap
from typing import Any

from rayzero.engine.config.key_table import FREE_FORM_SECTIONS, KEYS
from rayzero.engine.config.keys import REFUSED, Key
from rayzero.engine.config.model import EngineConfig
from rayzero.engine.errors import did_you_mean
from rayzero.engine.validation import repr_value

_DEFAULT_CONFIG = EngineConfig()


def list_children() -> dict[str, list[str]]:
    """{path of a section: the names of its keys}; the top of the document is ""."""
    children: dict[str, dict[str, None]] = {}
    for path in KEYS:
        parts = path.split(".")
        for depth, part in enumerate(parts):
            children.setdefault(".".join(parts[:depth]), {})[part] = None
    return {section: sorted(names) for section, names in children.items()}


_CHILDREN = list_children()


def split_known_keys(
    document: dict[str, Any], mistakes: list[str], prefix: str = ""
) -> dict[str, Any]:
    """The part of the document that `EngineConfig` validates: keys that are its fields.

    Args:
        mistakes: gets a line for every unknown key, and for every refused key without a field whose
            value is active.
    """
    kept = {}
    for name, value in document.items():
        path = prefix + name
        key = KEYS.get(path)
        if key is not None and key.is_active is not None:
            if key.status is REFUSED and key.is_active(value):
                mistakes.append(refusal_message(key, value))
        elif path in FREE_FORM_SECTIONS and isinstance(value, dict):
            kept[name] = _check_free_form(path, value, mistakes)
        elif path in _CHILDREN and isinstance(value, dict):
            kept[name] = split_known_keys(value, mistakes, f"{path}.")
        elif key is not None or path in _CHILDREN:
            if value is not None:  # null means that the key is absent
                kept[name] = value
        else:
            known = _CHILDREN[prefix.rstrip(".")]
            hint = did_you_mean(name, known)
            if not hint and prefix:
                hint = f"; known keys here: {', '.join(known)}"
            mistakes.append(f"{path}: unknown key{hint}")
    return kept


def _check_free_form(section: str, params: dict[str, Any], mistakes: list[str]) -> dict[str, Any]:
    """The params without the keys that have an entry in `KEYS`, which are not the optimizer's."""
    rows = {name: KEYS.get(f"{section}.{name}") for name in params}
    for name, row in rows.items():
        if (
            row is not None
            and row.status is REFUSED
            and row.is_active
            and row.is_active(params[name])
        ):
            mistakes.append(refusal_message(row, params[name]))
    return {name: value for name, value in params.items() if rows[name] is None}


def refused_fields(config: EngineConfig) -> Iterator[str]:
    """A line for every refused field whose value is not its default."""
    for key in KEYS.values():
        if key.status is REFUSED and key.is_active is None and is_in_force(config, key.path):
            value = get_field(config, key.path)
            if value != get_field(_DEFAULT_CONFIG, key.path):
                yield refusal_message(key, value)


def refusal_message(key: Key, seen: Any) -> str:
    """The message for a refused value of a key."""
    use = f"; use {key.alternative}" if key.alternative else ""
    return f"{key.path}: refused: {key.reason}{use} (seen: {repr_value(seen)})"


def get_field(config: EngineConfig, path: str) -> Any:
    """A field's value; None below a section that is None."""
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def is_in_force(config: EngineConfig, path: str) -> bool:
    """Whether the key's section is present, not `enabled: false` and not `device: none`."""
    *outer, last = path.split(".")
    section: Any = config
    for part in outer:
        section = getattr(section, part, None)
        if section is None:
            return False
    off = not getattr(section, "enabled", True) or getattr(section, "device", "") == "none"
    return last in ("enabled", "device") or not off


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

"""Older ways to write a config: other names, booleans in place of sections. One table of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rayzero.engine.config.paths import find, put, take
from rayzero.engine.validation import shown

Turn = Callable[[Any], Any]


def _as_it_is(value: Any) -> Any:
    return value


def _if_true(meaning: str) -> Turn:
    def turn(value: Any) -> Any:
        if value not in (True, False, None, "auto"):
            raise ValueError("true or false was expected")
        return meaning if value is True else None

    return turn


@dataclass(frozen=True)
class OldName:
    """A key's older name.

    Attributes:
        old: its path.
        new: the path of the key it means.
        turn: from its value to that of the new key; None asks for nothing. A ValueError says what
            is wrong with it.
        says: what becomes of the value, where it does not stay as it is.
    """

    old: str
    new: str
    turn: Turn = _as_it_is
    says: str = ""


_ZERO = "zero_optimization."
_UNPREFIXED = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
    *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
    *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
)
OLD_NAMES = (
    OldName("bfloat16", "bf16"),
    OldName("bf16.check_overflow", "bf16.check_grad_overflow"),
    OldName(
        "fp32_allreduce",
        "communication_data_type",
        _if_true("fp32"),
        '`true` is `"fp32"`',
    ),
    OldName("allgather_size", _ZERO + "allgather_bucket_size"),
    OldName(
        _ZERO + "cpu_offload",
        _ZERO + "offload_optimizer.device",
        _if_true("cpu"),
        '`true` is `"cpu"`',
    ),
    OldName(
        _ZERO + "cpu_offload_param",
        _ZERO + "offload_param.device",
        _if_true("cpu"),
        '`true` is `"cpu"`',
    ),
    OldName(
        _ZERO + "cpu_offload_params",
        _ZERO + "offload_param.device",
        _if_true("cpu"),
        '`true` is `"cpu"`',
    ),
    OldName(
        _ZERO + "stage3_gather_fp16_weights_on_model_save",
        _ZERO + "stage3_gather_16bit_weights_on_model_save",
    ),
    OldName(
        _ZERO + "gather_fp16_weights_on_model_save",
        _ZERO + "stage3_gather_16bit_weights_on_model_save",
    ),
    *(OldName(_ZERO + name, _ZERO + "stage3_" + name) for name in _UNPREFIXED),
    OldName(
        "activation_checkpointing.partitioned_activations",
        "activation_checkpointing.partition_activations",
    ),
)


@dataclass(frozen=True)
class Short:
    """A section that may be written as a boolean.

    Attributes:
        path: the section's.
        true: what `true` means.
        false: what `false` means.
    """

    path: str
    true: dict[str, Any]
    false: dict[str, Any]


_ON, _OFF, _CPU, _NONE = (
    {"enabled": True},
    {"enabled": False},
    {"device": "cpu"},
    {"device": "none"},
)
SHORTS = (
    Short("zero_optimization", {"stage": 1}, {"stage": 0}),
    Short("fp16", _ON, _OFF),
    Short("bf16", _ON, _OFF),
    Short("bfloat16", _ON, _OFF),
    Short("torch_autocast", _ON, _OFF),
    Short("zero_optimization.offload_optimizer", _CPU, _NONE),
    Short("zero_optimization.offload_param", _CPU, _NONE),
)


def lengthen(document: dict[str, Any]) -> dict[str, str]:
    """Writes sections out that were given as a boolean; the document is changed.

    Returns:
        {path of a key that came of it: how it was written}
    """
    told: dict[str, str] = {}
    for short in SHORTS:
        value = find(document, short.path)
        if isinstance(value, bool):
            meaning = short.true if value else short.false
            put(document, short.path, dict(meaning))
            told |= {
                f"{short.path}.{key}": f"{short.path}: {str(value).lower()}" for key in meaning
            }
    return told


def rename(document: dict[str, Any], told: dict[str, str], mistakes: list[str]) -> None:
    """Gives every key its name of today; the document is changed.

    Args:
        told: gets {new path: how it was written}.
        mistakes: gets a line where an old and a new name disagree.
    """
    for one in OLD_NAMES:
        found = take(document, one.old)
        if found is None:
            continue
        try:
            value = one.turn(found[0])
        except ValueError as error:
            mistakes.append(f"{one.old}: {error} (seen: {shown(found[0])})")
            continue
        if value is None:
            continue
        present = find(document, one.new)
        if isinstance(value, dict) and isinstance(present, dict) and _agree(value, present):
            value = {**value, **present}
        elif present is not None and present != value:
            mistakes.append(
                f"{one.old}: is the old name of {one.new}, and the two disagree "
                f"({shown(found[0])} and {shown(present)})"
            )
            continue
        if not put(document, one.new, value):
            mistakes.append(f"{one.old}: is the old name of {one.new}, which has no place here")
            continue
        for path in [path for path in told if path.startswith(f"{one.old}.")]:
            del told[path]  # there is no such path any more
        for path in _leaves(one.new, value):
            told[path] = f"old name {one.old}"


def _agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in one.keys() & other.keys())


def _leaves(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}", inner)
    else:
        yield path

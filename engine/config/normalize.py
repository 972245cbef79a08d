"""Normalizes a document: old names, booleans in place of sections; access by dotted paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rayzero.engine.config.key_table import KEYS
from rayzero.engine.validation import repr_value


def get_path(document: dict[str, Any], path: str, missing: Any = None) -> Any:
    """The value at `path`, or `missing`."""
    node: Any = document
    for part in path.split("."):
        if not isinstance(node, dict) or part not in node:
            return missing
        node = node[part]
    return node


def set_path(document: dict[str, Any], path: str, value: Any) -> bool:
    """Sets the value at `path`; returns False if a parent is not a mapping."""
    *outer, last = path.split(".")
    node: Any = document
    for part in outer:
        node = node.setdefault(part, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        return False
    node[last] = value
    return True


def pop_path(document: dict[str, Any], path: str) -> tuple[Any] | None:
    """Removes and returns the value at `path`, in a tuple; None if there is none."""
    outer, _, last = path.rpartition(".")
    parent = get_path(document, outer) if outer else document
    return (parent.pop(last),) if isinstance(parent, dict) and last in parent else None


ConvertFn = Callable[[Any], Any]


def _identity(value: Any) -> Any:
    return value


def _true_means(meaning: str) -> ConvertFn:
    def convert(value: Any) -> Any:
        if value not in (True, False, None, "auto"):
            raise ValueError("true or false was expected")
        return meaning if value is True else None

    return convert


@dataclass(frozen=True)
class OldName:
    """A key's older name.

    Attributes:
        old: its path.
        new: the path of the current key.
        convert: maps its value to that of the new key; None leaves the key out. Raises ValueError
            for an invalid value.
        description: the conversion, where the value changes.
    """

    old: str
    new: str
    convert: ConvertFn = _identity
    description: str = ""


def _field_old_names() -> Iterator[OldName]:
    for key in KEYS.values():
        for old in key.old_names:
            if key.old_true is None:
                yield OldName(old, key.path)
            else:
                text = f'`true` is `"{key.old_true}"`'
                yield OldName(old, key.path, _true_means(key.old_true), text)


OLD_NAMES = (OldName("bfloat16", "bf16"), *_field_old_names())
"""A section's old name, then those that fields declare."""


@dataclass(frozen=True)
class Shorthand:
    """A section that may be written as a boolean.

    Attributes:
        path: of the section.
        true: contents that `true` stands for.
        false: contents that `false` stands for.
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


SHORTHANDS = (
    Shorthand("zero_optimization", {"stage": 1}, {"stage": 0}),
    Shorthand("fp16", _ON, _OFF),
    Shorthand("bf16", _ON, _OFF),
    Shorthand("bfloat16", _ON, _OFF),
    Shorthand("torch_autocast", _ON, _OFF),
    Shorthand("zero_optimization.offload_optimizer", _CPU, _NONE),
    Shorthand("zero_optimization.offload_param", _CPU, _NONE),
)


def expand_shorthand(document: dict[str, Any]) -> dict[str, str]:
    """Replaces sections that were given as a boolean, in place.

    Returns:
        {path of a resulting key: how it was written}
    """
    provenance: dict[str, str] = {}
    for short in SHORTHANDS:
        value = get_path(document, short.path)
        if isinstance(value, bool):
            meaning = short.true if value else short.false
            set_path(document, short.path, dict(meaning))
            provenance |= {
                f"{short.path}.{key}": f"{short.path}: {str(value).lower()}" for key in meaning
            }
    return provenance


def rename_old_keys(
    document: dict[str, Any], provenance: dict[str, str], mistakes: list[str]
) -> None:
    """Renames old keys to their current names, in place.

    Args:
        provenance: gets {new path: how it was written}.
        mistakes: gets a line where an old and a new name disagree.
    """
    for name in OLD_NAMES:
        popped = pop_path(document, name.old)
        if popped is None:
            continue
        try:
            value = name.convert(popped[0])
        except ValueError as error:
            mistakes.append(f"{name.old}: {error} (seen: {repr_value(popped[0])})")
            continue
        if value is None:
            continue
        present = get_path(document, name.new)
        if isinstance(value, dict) and isinstance(present, dict) and _values_agree(value, present):
            value = {**value, **present}
        elif present is not None and present != value:
            mistakes.append(
                f"{name.old}: is the old name of {name.new}, and the two disagree "
                f"({repr_value(popped[0])} and {repr_value(present)})"
            )
            continue
        if not set_path(document, name.new, value):
            mistakes.append(
                f"{name.old}: is the old name of {name.new}, whose section is no mapping"
            )
            continue
        for path in [path for path in provenance if path.startswith(f"{name.old}.")]:
            del provenance[path]  # the path was renamed
        for path in _leaf_paths(name.new, value):
            provenance[path] = f"old name {name.old}"


def _values_agree(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(first[key] == second[key] for key in first.keys() & second.keys())


def _leaf_paths(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaf_paths(f"{path}.{key}", inner)
    else:
        yield path

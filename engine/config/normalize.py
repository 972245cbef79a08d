"""Old names, shorthands, dotted paths.

Older ways to write a config: other names, booleans in place of sections. One table of each.

Values of nested mappings by dotted paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rayzero.engine.config.key_table import KEYS
from rayzero.engine.validation import repr_value


def get_path(document: dict[str, Any], path: str, missing: Any = None) -> Any:
    """The value at `path`, or `missing`."""
    here: Any = document
    for part in path.split("."):
        if not isinstance(here, dict) or part not in here:
            return missing
        here = here[part]
    return here


def set_path(document: dict[str, Any], path: str, value: Any) -> bool:
    """Sets the value at `path`; False if something that is no mapping is in the way."""
    *outer, last = path.split(".")
    here: Any = document
    for part in outer:
        here = here.setdefault(part, {}) if isinstance(here, dict) else None
    if not isinstance(here, dict):
        return False
    here[last] = value
    return True


def pop_path(document: dict[str, Any], path: str) -> tuple[Any] | None:
    """Removes the value at `path`, and hands it out in a tuple; None if there is none."""
    outer, _, last = path.rpartition(".")
    here = get_path(document, outer) if outer else document
    return (here.pop(last),) if isinstance(here, dict) and last in here else None


ConvertFn = Callable[[Any], Any]


def _identity(value: Any) -> Any:
    return value


def _true_means(meaning: str) -> ConvertFn:
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
    """Writes sections out that were given as a boolean; the document is changed.

    Returns:
        {path of a key that came of it: how it was written}
    """
    told: dict[str, str] = {}
    for short in SHORTHANDS:
        value = get_path(document, short.path)
        if isinstance(value, bool):
            meaning = short.true if value else short.false
            set_path(document, short.path, dict(meaning))
            told |= {
                f"{short.path}.{key}": f"{short.path}: {str(value).lower()}" for key in meaning
            }
    return told


def rename_old_keys(document: dict[str, Any], told: dict[str, str], mistakes: list[str]) -> None:
    """Gives every key its name of today; the document is changed.

    Args:
        told: gets {new path: how it was written}.
        mistakes: gets a line where an old and a new name disagree.
    """
    for one in OLD_NAMES:
        found = pop_path(document, one.old)
        if found is None:
            continue
        try:
            value = one.convert(found[0])
        except ValueError as error:
            mistakes.append(f"{one.old}: {error} (seen: {repr_value(found[0])})")
            continue
        if value is None:
            continue
        present = get_path(document, one.new)
        if isinstance(value, dict) and isinstance(present, dict) and _values_agree(value, present):
            value = {**value, **present}
        elif present is not None and present != value:
            mistakes.append(
                f"{one.old}: is the old name of {one.new}, and the two disagree "
                f"({repr_value(found[0])} and {repr_value(present)})"
            )
            continue
        if not set_path(document, one.new, value):
            mistakes.append(f"{one.old}: is the old name of {one.new}, which has no place here")
            continue
        for path in [path for path in told if path.startswith(f"{one.old}.")]:
            del told[path]  # there is no such path any more
        for path in _leaf_paths(one.new, value):
            told[path] = f"old name {one.old}"


def _values_agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in one.keys() & other.keys())


def _leaf_paths(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaf_paths(f"{path}.{key}", inner)
    else:
        yield path

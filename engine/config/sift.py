"""A document against the table of keys: what is known, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rayzero.engine.config.document import EngineConfig
from rayzero.engine.config.keys.rows import REFUSED, Key
from rayzero.engine.config.keys.table import KEYS
from rayzero.engine.errors import nearest
from rayzero.engine.validation import shown

FREE = ("optimizer.params", "scheduler.params")
"""Sections whose keys are told by something else: the optimizer, the schedule."""

_NOTHING = EngineConfig()


def children() -> dict[str, list[str]]:
    """{path of a section: the names that stand in it}; the top of the document is ""."""
    found: dict[str, dict[str, None]] = {}
    for path in KEYS:
        parts = path.split(".")
        for depth, part in enumerate(parts):
            found.setdefault(".".join(parts[:depth]), {})[part] = None
    return {section: sorted(names) for section, names in found.items()}


_CHILDREN = children()


def sift(document: dict[str, Any], mistakes: list[str], prefix: str = "") -> dict[str, Any]:
    """What of the document the config's model is to check: keys that are fields of it.

    Args:
        mistakes: gets a line for every unknown key, and for every refused key outside the model
            that asks for something.
    """
    kept = {}
    for name, value in document.items():
        path = prefix + name
        key = KEYS.get(path)
        if key is not None and key.asks is not None:
            if key.status is REFUSED and key.asks(value):
                mistakes.append(refusal(key, value))
        elif path in FREE and isinstance(value, dict):
            kept[name] = _free(path, value, mistakes)
        elif path in _CHILDREN and isinstance(value, dict):
            kept[name] = sift(value, mistakes, f"{path}.")
        elif key is not None or path in _CHILDREN:
            if value is not None:  # null is as if the key were not there
                kept[name] = value
        else:
            known = _CHILDREN[prefix.rstrip(".")]
            hint = nearest(name, known)
            if not hint and prefix:
                hint = f"; known keys here: {', '.join(known)}"
            mistakes.append(f"{path}: unknown key{hint}")
    return kept


def _free(section: str, params: dict[str, Any], mistakes: list[str]) -> dict[str, Any]:
    """All keys, but for those that have a row."""
    rows = {name: KEYS.get(f"{section}.{name}") for name in params}
    for name, row in rows.items():
        if row is not None and row.status is REFUSED and row.asks and row.asks(params[name]):
            mistakes.append(refusal(row, params[name]))
    return {name: value for name, value in params.items() if rows[name] is None}


def refusals(config: EngineConfig) -> Iterator[str]:
    """A line for every refused field of the model whose value is not its default."""
    for key in KEYS.values():
        if key.status is REFUSED and key.asks is None and in_force(config, key.path):
            value = field(config, key.path)
            if value != field(_NOTHING, key.path):
                yield refusal(key, value)


def refusal(key: Key, seen: Any) -> str:
    """Why this value of the key is not taken."""
    use = f"; use {key.use}" if key.use else ""
    return f"{key.path}: refused: {key.reason}{use} (seen: {shown(seen)})"


def field(config: EngineConfig, path: str) -> Any:
    """A field's value; None below a section that is not there."""
    here: Any = config
    for part in path.split("."):
        here = getattr(here, part, None)
    return here


def in_force(config: EngineConfig, path: str) -> bool:
    """Whether the key is in no section that says `enabled: false` or offloads to `none`."""
    *outer, last = path.split(".")
    here: Any = config
    for part in outer:
        here = getattr(here, part, None)
        if here is None:
            return False
    off = not getattr(here, "enabled", True) or getattr(here, "device", "") == "none"
    return last in ("enabled", "device") or not off

"""KEYS: every key that DeepSpeed 0.19 knows, and rayzero's, with its metadata.

Derived: keys that are fields come from `EngineConfig`, the others from `unsupported`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pydantic import BaseModel

from rayzero.engine.config.keys import Key
from rayzero.engine.config.model import EngineConfig
from rayzero.engine.config.unsupported import UNSUPPORTED_KEYS
from rayzero.engine.validation import nested_section

FREE_FORM_SECTIONS = ("optimizer.params", "scheduler.params")
"""Sections whose keys are those of the optimizer or the schedule."""


def _field_keys(
    model: type[BaseModel], prefix: str = "", group: str = ""
) -> Iterator[tuple[str, Key]]:
    """(group, key) of every field, in order; sections recursively."""
    for name, field in model.model_fields.items():
        path, key = prefix + name, field.json_schema_extra
        if isinstance(key, Key):
            group = key.group or group
            yield group, replace(key, path=path)
        if (section := nested_section(field.annotation)) is not None:
            yield from _field_keys(section, f"{path}.", group)


def _group_keys() -> dict[str, tuple[Key, ...]]:
    groups: dict[str, list[Key]] = {}
    for group, key in _field_keys(EngineConfig):
        groups.setdefault(group, []).append(key)
    for group, rows in UNSUPPORTED_KEYS.items():
        groups.setdefault(group, []).extend(replace(key, path=path) for path, key in rows.items())
    return {group: tuple(keys) for group, keys in groups.items()}


KEY_GROUPS = _group_keys()
"""All keys by subject, in the order in which they are shown."""

KEYS: dict[str, Key] = {key.path: key for keys in KEY_GROUPS.values() for key in keys}

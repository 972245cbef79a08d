"""Keys that are refused, when they ask for something."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rayzero.engine.config.document import EngineConfig
from rayzero.engine.config.keys.rows import REFUSED, Key
from rayzero.engine.config.keys.table import KEYS

_NOTHING = EngineConfig()


def refusals(config: EngineConfig) -> Iterator[str]:
    """A line for every refused key whose value is not the one that asks for nothing."""
    for key in KEYS.values():
        if key.status is REFUSED:
            asked = _asked(config, key.path)
            if asked is not None and asked != _asked(_NOTHING, key.path, in_force=False):
                yield refusal(key, asked)


def refusal(key: Key, seen: Any) -> str:
    """Why this value of the key is not taken."""
    use = f"; use {key.use}" if key.use else ""
    return f"{key.path}: refused, {key.reason}{use} (seen: {seen!r})"


def _asked(config: EngineConfig, path: str, *, in_force: bool = True) -> Any:
    """The value at a path; None, if only what is in force counts, in a section not enabled."""
    here: Any = config
    for part in path.split("."):
        if in_force and part != "enabled" and not getattr(here, "enabled", True):
            return None
        here = getattr(here, part)
    return here

"""Values of nested mappings by dotted paths."""

from __future__ import annotations

from typing import Any


def find(document: dict[str, Any], path: str, missing: Any = None) -> Any:
    """The value at `path`, or `missing`."""
    here: Any = document
    for part in path.split("."):
        if not isinstance(here, dict) or part not in here:
            return missing
        here = here[part]
    return here


def put(document: dict[str, Any], path: str, value: Any) -> bool:
    """Sets the value at `path`; False if something that is no mapping is in the way."""
    *outer, last = path.split(".")
    here: Any = document
    for part in outer:
        here = here.setdefault(part, {}) if isinstance(here, dict) else None
    if not isinstance(here, dict):
        return False
    here[last] = value
    return True


def take(document: dict[str, Any], path: str) -> tuple[Any] | None:
    """Removes the value at `path`, and hands it out in a tuple; None if there is none."""
    outer, _, last = path.rpartition(".")
    here = find(document, outer) if outer else document
    return (here.pop(last),) if isinstance(here, dict) and last in here else None

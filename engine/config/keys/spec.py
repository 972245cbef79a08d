"""What a row of the table is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class KeyStatus(StrEnum):
    """What becomes of a key."""

    IMPLEMENTED = "implemented"
    NO_OP = "no-op"
    REFUSED = "refused"


IMPLEMENTED, NO_OP, REFUSED = KeyStatus.IMPLEMENTED, KeyStatus.NO_OP, KeyStatus.REFUSED


NOT_YET_REASON = "it is not in this version yet"


_UNSET_VALUES = (None, False, 0, "auto", "false", "False")


@dataclass(frozen=True)
class Key:
    """One key.

    A refused key may stand in a config with the value that asks for nothing: its default, null or
    false; in a section with `enabled: false`, any value.

    Attributes:
        path: with dots, from the top of the config.
        status: what becomes of it. To change it is all that landing a feature takes here.
        what: what the key asks for.
        why: why it does nothing, or why it is refused.
        use: what to use instead of a refused key.
        asks: for a key that is not a field of the config's model, whether a value of it asks for
            something. What lies below such a key is not looked at, and has no rows.
    """

    path: str
    status: KeyStatus
    description: str
    why: str = ""
    alternative: str = ""
    is_active: Callable[[Any], bool] | None = None

    @property
    def reason(self) -> str:
        """Why it does nothing or is refused; empty for an implemented key."""
        if self.status is IMPLEMENTED:
            return ""
        return self.why or NOT_YET_REASON


def is_set(value: Any) -> bool:
    """A value that asks for something just by not being empty or false."""
    return value not in _UNSET_VALUES and value not in ({}, [], "")


def is_enabled(value: Any) -> bool:
    """A section that asks for something when its `enabled` says so."""
    return is_set(value.get("enabled")) if isinstance(value, dict) else is_set(value)


def is_enabled_anywhere(value: Any) -> bool:
    """A section of sections, each with an `enabled`."""
    if not isinstance(value, dict):
        return is_set(value)
    return is_enabled(value) or any(
        is_enabled_anywhere(inner) for inner in value.values() if isinstance(inner, dict)
    )


def active_unless(*values: Any) -> Callable[[Any], bool]:
    """Any value but these, and those that ask for nothing anywhere."""
    return lambda value: is_set(value) and value not in values


def active_if_child(name: str, *values: Any) -> Callable[[Any], bool]:
    """A section that asks for something when this key of it does, other than these values."""

    def asks(value: Any) -> bool:
        return active_unless(*values)(value.get(name)) if isinstance(value, dict) else is_set(value)

    return asks

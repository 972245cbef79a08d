"""`Key`: the metadata of one config key, declared with its field.

`implemented`, `no_op` and `refused` take the place of pydantic's `Field`: a field made with them
carries its key's status, meaning, old names and "auto" rule. `model.KEYS` collects them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import Field


class KeyStatus(StrEnum):
    """How the engine treats a key."""

    IMPLEMENTED = "implemented"
    NO_OP = "no-op"
    REFUSED = "refused"


IMPLEMENTED = KeyStatus.IMPLEMENTED
NO_OP = KeyStatus.NO_OP
REFUSED = KeyStatus.REFUSED
NOT_YET_REASON = "not supported in this version"
_UNSET_VALUES = (None, False, 0, "auto", "false", "False")


@dataclass(frozen=True)
class Auto:
    """The value that "auto" stands for; None leaves the key out. `reason` is shown to users.

    `copied_from` is the path of a key whose value is used instead.
    """

    value: Any
    reason: str
    copied_from: str = ""


@dataclass(frozen=True)
class Key:
    """Metadata of one config key.

    A refused key may be present with a value that requests nothing: its default, null or false;
    in a section with `enabled: false`, any value.
    """

    status: KeyStatus
    description: str  # what the key requests
    reason: str = ""  # why it has no effect or is refused; empty for an implemented key
    alternative: str = ""  # what to use instead of a refused key
    # Whether a value of a refused key requests something, where that is not every value but the
    # default.
    is_active: Callable[[Any], bool] | None = None
    # Heading in `rayzero config explain` and docs/config.md; empty: that of the field before it.
    group: str = ""
    old_names: tuple[str, ...] = ()  # older paths
    old_true: str | None = None  # what `true` under an old name stands for, if it was a boolean
    auto: Auto | None = None  # what "auto" becomes, where that is not the default
    path: str = ""  # from the top of the config; set by `model.KEYS`

    @property
    def text(self) -> str:
        """Description, status and alternative as sentences."""
        text = f"{self.description[:1].upper()}{self.description[1:]}."
        if self.reason:
            use = f" Use {self.alternative}." if self.alternative else ""
            text += f" {str(self.status).capitalize()}: {self.reason}.{use}"
        return text

    def __call__(self, schema: dict[str, Any]) -> None:
        """Pydantic's `json_schema_extra`."""
        schema["description"] = self.text


def implemented(default: Any, description: str, **metadata: Any) -> Any:
    """A field that has an effect; `metadata` is the rest of `Key`'s attributes."""
    return Field(default, json_schema_extra=Key(IMPLEMENTED, description, **metadata))


def no_op(default: Any, description: str, reason: str, **metadata: Any) -> Any:
    """A field that is checked and has no effect."""
    return Field(default, json_schema_extra=Key(NO_OP, description, reason, **metadata))


def refused(default: Any, description: str, reason: str = NOT_YET_REASON, **metadata: Any) -> Any:
    """A field of which only the default is accepted."""
    return Field(default, json_schema_extra=Key(REFUSED, description, reason, **metadata))


def is_set(value: Any) -> bool:
    """Whether a value is neither empty nor false."""
    return value not in _UNSET_VALUES and value not in ({}, [], "")


def is_enabled(value: Any) -> bool:
    return is_set(value.get("enabled")) if isinstance(value, dict) else is_set(value)

"""`Key`: the metadata of one config key, declared with its field.

`implemented` takes the place of pydantic's `Field`: a field made with it carries its key's meaning,
old names and "auto" rule. The keys without effect, and the refused ones, are rows of `inert.toml`,
of which `ConfigSection` makes fields. `model.KEYS` collects all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    active: str = ""  # name in `ACTIVE` of the test that `requests` uses
    # Heading in `rayzero config explain` and docs/config.md; empty: that of the previous field.
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

    def requests(self, value: Any, default: Any) -> bool:
        """Returns whether a value of a refused key requests something. Unless `active` names
        another test, every value does but the default, empty and false ones."""
        if self.active:
            return ACTIVE[self.active](value)
        return is_set(value) and value != default

    def __call__(self, schema: dict[str, Any]) -> None:
        """Describes the key in a JSON schema; called by pydantic, as the `json_schema_extra`."""
        schema["description"] = self.text


def implemented(default: Any, description: str, **metadata: Any) -> Any:
    """Returns a pydantic field of a key that has an effect; `metadata` are other attributes of the
    `Key`."""
    return Field(default, json_schema_extra=Key(IMPLEMENTED, description, **metadata))


def is_set(value: Any) -> bool:
    """Returns whether a value is neither empty nor false."""
    return value not in _UNSET_VALUES and value not in ({}, [], "")


def is_enabled(value: Any) -> bool:
    return is_set(value.get("enabled")) if isinstance(value, dict) else is_set(value)


def _is_present(value: Any) -> bool:
    """Returns whether a section is present and its `enabled`, if it has one, is not false."""
    return is_set(value) and (not isinstance(value, dict) or is_set(value.get("enabled", True)))


def _is_enabled_anywhere(value: Any) -> bool:
    """Returns whether a section, or a section nested in it, is enabled."""
    return is_enabled(value) or (
        isinstance(value, dict)
        and any(_is_enabled_anywhere(inner) for inner in value.values() if isinstance(inner, dict))
    )


def _splits_layers(value: Any) -> bool:
    size = value.get("autotp_size") if isinstance(value, dict) else value
    return is_set(size) and size != 1


ACTIVE: Mapping[str, Callable[[Any], bool]] = {
    "enabled": is_enabled,
    "present": _is_present,
    "enabled anywhere": _is_enabled_anywhere,
    "splits layers": _splits_layers,
    "splits in a pass": lambda passes: bool({"autosp", "autotp"} & {*map(str, passes or ())}),
}

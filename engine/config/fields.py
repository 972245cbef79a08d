"""Types of config values: numbers and choices as config files spell them.

Files contain `5e8`, `"8"`, `15099494.4` and `Infinity` for integers, and YAML reads `1e-5` as text.
A validator returns a value that it cannot convert unchanged: the strict type that is checked after
it rejects the value, and names the key.
"""

from __future__ import annotations

import math
import sys
import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rayzero.engine.config.keys import NO_OP, REFUSED, Key
from rayzero.engine.errors import did_you_mean

_INERT = tomllib.loads(files("rayzero.engine.config").joinpath("inert.toml").read_text())
_TEXTS = _INERT.pop("texts")
_INERT_ROWS = _INERT.pop("keys")

NO_LIMIT = sys.maxsize  # the size that `Infinity` stands for


class StrictModel(BaseModel):
    """Unknown keys are errors."""

    # Infinity is kept when a config is serialized.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class ConfigSection(StrictModel):
    """A section of the config, in which null means that a key is absent.

    `path` is the section's place in the document. A subclass declares the keys that have an effect;
    it gets a field, too, for each of its keys in `inert.toml`, which have none.
    """

    def __init_subclass__(cls, path: str | None = None, **options: Any) -> None:
        # This runs before pydantic collects the fields.
        super().__init_subclass__(**options)
        for name, row in _INERT_ROWS.get(path, {}).items():
            cls.__annotations__[name] = _inert_type(row)
            setattr(cls, name, Field(row.get("default"), json_schema_extra=_inert_key(row)))

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, section: Any) -> Any:
        if not isinstance(section, dict):
            return section
        return {
            key: value
            for key, value in section.items()
            if value is not None or key not in cls.model_fields
        }


def parse_number(value: Any) -> Any:
    """Converts text and integers to float; returns other values unchanged."""
    if isinstance(value, bool):
        return value
    try:
        return float(value) if isinstance(value, str | int) else value
    except OverflowError:
        raise ValueError("the number is too large") from None
    except ValueError:
        return value


def parse_integer(value: Any) -> Any:
    """Converts a float or text that is a whole number to int; returns other values unchanged."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            value = parse_number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def parse_size(value: Any) -> Any:
    """Parses as `parse_integer` does, but fractions are truncated and infinity means no limit."""
    value = parse_integer(value)
    if not isinstance(value, float) or math.isnan(value) or value == -math.inf:
        return value
    return NO_LIMIT if value == math.inf else int(value)


def reject_bool(value: Any) -> Any:
    """Rejects booleans, which would otherwise pass as 0 and 1."""
    if isinstance(value, bool):
        raise ValueError("a number was expected")
    return value


def name_validator(names: Mapping[str, str], what: str) -> Callable[[Any], Any]:
    """Returns a validator of names in any case.

    Args:
        names: {the name in lower case, or an alias: the name}.
        what: what is named, for messages: "a dtype".
    """

    def find(value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError(f"the name of {what} was expected")
        name = names.get(value.lower())
        if name is None:
            known = list(dict.fromkeys(names.values()))
            hint = did_you_mean(value, known)
            raise ValueError(f"not {what} that this version supports{hint}: {', '.join(known)}")
        return name

    return find


Integer: TypeAlias = Annotated[
    int, BeforeValidator(parse_integer), Field(ge=-NO_LIMIT, le=NO_LIMIT, strict=True)
]
PositiveInt: TypeAlias = Annotated[Integer, Field(gt=0)]
NonNegativeInt: TypeAlias = Annotated[Integer, Field(ge=0)]

# Elements or bytes.
PositiveSize: TypeAlias = Annotated[PositiveInt, BeforeValidator(parse_size)]
NonNegativeSize: TypeAlias = Annotated[NonNegativeInt, BeforeValidator(parse_size)]

FiniteFloat: TypeAlias = Annotated[
    float, BeforeValidator(parse_number), Field(allow_inf_nan=False, strict=True)
]
NonNegativeFloat: TypeAlias = Annotated[FiniteFloat, Field(ge=0.0)]
PositiveFloat: TypeAlias = Annotated[FiniteFloat, Field(gt=0.0)]
UnitFraction: TypeAlias = Annotated[FiniteFloat, Field(ge=0.0, le=1.0)]

DTYPE_ALIASES = {
    name: short
    for short, names in {
        "fp32": ("fp32", "float32", "float", "torch.float32"),
        "fp16": ("fp16", "float16", "half", "torch.float16"),
        "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    }.items()
    for name in names
}
DtypeName: TypeAlias = Annotated[str, BeforeValidator(name_validator(DTYPE_ALIASES, "a dtype"))]
"""One of "fp32", "fp16", "bf16"."""

INERT_TYPES: Mapping[str, Any] = {
    "any": Any,
    "integer": Integer,
    "positive": PositiveInt,
    "count": NonNegativeInt,
    "size": NonNegativeSize,
    "fraction": UnitFraction,
    "text": str,
    "texts": tuple[str, ...],
    "text or texts": str | tuple[str, ...],
    "dtype": DtypeName,
    "mapping": dict[str, Any],
}
"""The types of fields, by the `type` of a row of `inert.toml`."""


def _inert_type(row: Mapping[str, Any]) -> Any:
    if "type" not in row:
        return bool
    kind = INERT_TYPES[row["type"]]
    return kind if "default" in row or kind is Any else kind | None


def _inert_key(row: Mapping[str, Any]) -> Key:
    return Key(
        REFUSED if "refused" in row else NO_OP,
        row["asks"].format_map(_TEXTS),
        row["refused" if "refused" in row else "no_op"].format_map(_TEXTS),
        row.get("use", ""),
        row.get("active", ""),
        row.get("group", ""),
        tuple(row.get("old_names", ())),
    )

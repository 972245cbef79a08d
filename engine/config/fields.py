"""Types of config values: numbers and choices as config files spell them.

Files contain `5e8`, `"8"`, `15099494.4` and `Infinity` for integers, and YAML reads `1e-5` as text.
Values that cannot be converted are passed on: the strict type behind rejects them by name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rayzero.engine.errors import did_you_mean

NO_LIMIT = sys.maxsize  # what `Infinity` means for a size


class StrictModel(BaseModel):
    """Unknown keys are errors."""

    # Infinity is kept when a config is serialized.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class ConfigSection(StrictModel):
    """A section of the config, in which null means that a key is absent."""

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
    """Converts text and integers to float; other values are returned unchanged."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError("the number is too large") from None
    return value


def parse_integer(value: Any) -> Any:
    """Converts a float or text that is a whole number to int; others are returned unchanged."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            value = parse_number(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def parse_size(value: Any) -> Any:
    """As `parse_integer`, but fractions are truncated and infinity means no limit."""
    value = parse_integer(value)
    if not isinstance(value, float) or math.isnan(value):
        return value
    if math.isinf(value):
        return NO_LIMIT if value > 0 else value
    return int(value)


def reject_bool(value: Any) -> Any:
    """Rejects booleans, which would otherwise pass as 0 and 1."""
    if isinstance(value, bool):
        raise ValueError("a number was expected")
    return value


def name_validator(names: Mapping[str, str], what: str) -> Callable[[Any], Any]:
    """A validator for names in any case. `names` maps lower case spellings to names."""

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


PositiveInt: TypeAlias = Annotated[
    int, BeforeValidator(parse_integer), Field(gt=0, le=NO_LIMIT, strict=True)
]
"""At least 1, and whole: samples, steps."""
NonNegativeInt: TypeAlias = Annotated[
    int, BeforeValidator(parse_integer), Field(ge=0, le=NO_LIMIT, strict=True)
]
"""At least 0, and whole."""
PositiveSize: TypeAlias = Annotated[
    int, BeforeValidator(parse_size), Field(gt=0, le=NO_LIMIT, strict=True)
]
"""At least 1: elements or bytes."""
NonNegativeSize: TypeAlias = Annotated[
    int, BeforeValidator(parse_size), Field(ge=0, le=NO_LIMIT, strict=True)
]
"""At least 0: elements or bytes."""
Integer: TypeAlias = Annotated[
    int, BeforeValidator(parse_integer), Field(ge=-NO_LIMIT, le=NO_LIMIT, strict=True)
]
NonNegativeFloat: TypeAlias = Annotated[
    float, BeforeValidator(parse_number), Field(ge=0.0, allow_inf_nan=False, strict=True)
]
"""At least 0, and finite."""
PositiveFloat: TypeAlias = Annotated[
    float, BeforeValidator(parse_number), Field(gt=0.0, allow_inf_nan=False, strict=True)
]
"""More than 0, and finite."""
UnitFraction: TypeAlias = Annotated[
    float, BeforeValidator(parse_number), Field(ge=0.0, le=1.0, allow_inf_nan=False, strict=True)
]
"""From 0 to 1."""

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

"""The config's model as a flat list of fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayzero.engine.config.checks import FREE_FORM_SECTIONS
from rayzero.engine.config.model import EngineConfig


def leaves(
    model: type[BaseModel] = EngineConfig, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """(path, field) of every key that is not a section."""
    for name, field in model.model_fields.items():
        inner = section(field.annotation)
        if inner is None or prefix + name in FREE_FORM_SECTIONS:
            yield prefix + name, field
        else:
            yield from leaves(inner, f"{prefix}{name}.")


def section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = [section(part) for part in getattr(annotation, "__args__", ())]
    return next((one for one in found if one is not None), None)

"""Fields of the config model as a flat list."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayzero.engine.config.model import FREE_FORM_SECTIONS, EngineConfig
from rayzero.engine.validation import nested_section


def leaves(
    model: type[BaseModel] = EngineConfig, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """(path, field) of every key that is not a section."""
    for name, field in model.model_fields.items():
        inner = nested_section(field.annotation)
        if inner is None or prefix + name in FREE_FORM_SECTIONS:
            yield prefix + name, field
        else:
            yield from leaves(inner, f"{prefix}{name}.")

"""One clear message out of a failed pydantic validation. Used for engine configs and job files."""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import Repr
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rayzero.engine.errors import ConfigError, did_you_mean
from rayzero.engine.redact import redact_document

M = TypeVar("M", bound=BaseModel)

DOCUMENT_CONTEXT = {"document": True}
"""The validation context of what was read: a model that is made by a script has none."""


class _ShortRepr(Repr):
    """Long values are cut: a message must stay readable."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist = 3, 8, 8
        self.maxstring = self.maxother = self.maxlong = 80


_SHORT_REPR = _ShortRepr()


def repr_value(value: Any) -> str:
    """A value as it is told in messages."""
    return _SHORT_REPR.repr(value)


def validate_document(model: type[M], value: Any, what: str) -> M:
    """`value` as a `model`.

    Args:
        model: the pydantic model of the whole document.
        value: what was read; a mapping, if it is right.
        what: what the document is called in messages: "engine config", a file's name.

    Raises:
        ConfigError: naming every wrong key by its path, what was seen, and what is allowed.
    """
    if not isinstance(value, dict):
        raise ConfigError(
            f"{what}: a mapping of keys to values was expected, not {type(value).__name__}"
        )
    made, mistakes = validate_model(model, value)
    if made is None:
        raise_config_error(what, mistakes)
    return made


def validate_model(model: type[M], value: dict[str, Any]) -> tuple[M | None, list[str]]:
    """`value` as a `model`, or None and a line for every mistake in it."""
    try:
        return model.model_validate(value, context=DOCUMENT_CONTEXT), []
    except ValidationError as error:
        return None, error_lines(model, error)


def error_lines(model: type[BaseModel], error: ValidationError) -> list[str]:
    """A line for each place: what the members of a union each say is one mistake."""
    places = {one["loc"]: one for one in reversed(error.errors(include_url=False))}
    return [_error_line(model, one) for one in reversed(places.values())]


def raise_config_error(what: str, mistakes: Sequence[str]) -> NoReturn:
    """Raises one error for all mistakes in a document.

    Raises:
        ConfigError: always.
    """
    count = f"{len(mistakes)} mistakes:\n  " if len(mistakes) > 1 else ""
    raise ConfigError(f"{what}: {count}" + "\n  ".join(mistakes))


def _error_line(model: type[BaseModel], error: ErrorDetails) -> str:
    path = [str(part) for part in error["loc"]]
    name = ".".join(path) or "(top level)"
    if error["type"] == "extra_forbidden":
        known = _allowed_keys(model, path[:-1])
        hint = did_you_mean(path[-1], known) or f"; known keys here: {', '.join(known)}"
        return f"{name}: unknown key{hint}"
    if error["type"] == "missing":
        return f"{name}: this key is required"
    reason = error["msg"].removeprefix("Value error, ")
    seen = repr_value(redact_document(error["input"], path[-1] if path else ""))
    return f"{name}: {reason[:1].lower()}{reason[1:]} (seen: {seen})"


def _allowed_keys(model: type[BaseModel], path: list[str]) -> list[str]:
    """The keys the document allows at `path`, following nested models through optional types."""
    here: type[BaseModel] | None = model
    for part in path:
        field = here.model_fields.get(part) if here else None
        here = _nested_model(field.annotation) if field else None
    if here is None:
        return []
    return sorted(field.alias or name for name, field in here.model_fields.items())


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        if found := _nested_model(part):
            return found
    return None

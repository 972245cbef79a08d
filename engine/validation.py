"""Pydantic validation with one readable `ConfigError`, for engine configs and job files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from reprlib import Repr
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rayzero.engine.errors import ConfigError, did_you_mean
from rayzero.engine.redact import redact_document

M = TypeVar("M", bound=BaseModel)

_MAX_LISTED_KEYS = 60
_MAX_LISTED_MISTAKES = 50

_SHOWN_LEVELS = 3
_SHORT_REPR = Repr()
_SHORT_REPR.maxlevel = _SHOWN_LEVELS
_SHORT_REPR.maxdict = 8
_SHORT_REPR.maxlist = 8
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = _SHORT_REPR.maxlong = 80


def repr_value(value: Any) -> str:
    """Returns the text of a value for messages, truncated."""
    try:
        return _SHORT_REPR.repr(value)
    except ValueError:  # Python does not print integers of over 4300 digits
        return f"a {type(value).__name__} that is too large to print"


def validate_document(model: type[M], value: Any, what: str) -> M:
    """Returns a whole document as an instance of `model`; `what` is the document's name in
    messages, such as a file's name. Raises ConfigError, which names every wrong key by its path,
    what was seen, and what is allowed."""
    if not isinstance(value, dict):
        raise ConfigError(
            f"{what}: a mapping of keys to values was expected, not {type(value).__name__}"
        )
    validated, mistakes = validate_model(model, value)
    if validated is None:
        raise_config_error(what, mistakes)
    return validated


def validate_model(
    model: type[M], value: dict[str, Any], prefix: str = ""
) -> tuple[M | None, list[str]]:
    """Returns `value` as an instance of `model`, or None, and a line for every mistake. If `value`
    is a part of a document, `prefix` precedes its keys in the lines."""
    try:
        return model.model_validate(value), []
    except ValidationError as error:
        return None, [prefix + line for line in error_lines(model, error)]


def error_lines(model: type[BaseModel], error: ValidationError) -> list[str]:
    """Returns a line for each location: the errors of a union's members count as one. The keys that
    a section knows are listed once."""
    by_location = {entry["loc"]: entry for entry in reversed(error.errors(include_url=False))}
    lines: list[str] = []
    listed: set[str] = set()
    for entry in reversed(by_location.values()):
        line, separator, keys = _error_line(model, entry).partition("; known keys: ")
        lines.append(line if keys in listed else line + separator + keys)
        listed.add(keys)
    return lines


def raise_config_error(what: str, mistakes: Sequence[str]) -> NoReturn:
    """Raises one ConfigError for all mistakes in a document."""
    count = f"{len(mistakes)} mistakes:\n  " if len(mistakes) > 1 else ""
    listed = list(mistakes[:_MAX_LISTED_MISTAKES])
    if len(mistakes) > len(listed):
        listed.append(f"... and {len(mistakes) - len(listed)} more")
    raise ConfigError(f"{what}: {count}" + "\n  ".join(listed))


def _error_line(model: type[BaseModel], error: ErrorDetails) -> str:
    path = [str(part) for part in error["loc"]]
    name = ".".join(f"{part:.100}" for part in path) or "(top level)"
    if error["type"] == "extra_forbidden":
        known = _allowed_keys(model, path[:-1])
        hint = did_you_mean(path[-1], known) or _place_hint(model, path[-1])
        if not hint and len(known) <= _MAX_LISTED_KEYS:
            hint = f"; known keys: {', '.join(known)}"
        return f"{name}: unknown key{hint}"
    if error["type"] == "missing":
        auto = ": a number; auto is filled in by transformers, Accelerate, or a job's `steps`"
        return f"{name}: this key is required{auto if path[-1:] == ['total_num_steps'] else ''}"
    reason = _reason(model, path, error)
    if not path:
        return f"{name}: {reason}"
    seen = repr_value(redact_document(error["input"], path[-1], _SHOWN_LEVELS))
    return f"{name}: {reason} (seen: {seen})"


def _reason(model: type[BaseModel], path: list[str], error: ErrorDetails) -> str:
    """Returns the reason why a value is refused, and what is allowed."""
    match error["type"]:
        case "model_type" | "model_attributes_type" | "dataclass_type":
            return f"keys and values were expected{_example(_section_at(model, path), error)}"
        case "dict_type":
            return "keys and values were expected"
        case "list_type":
            example = json.dumps([error["input"]]) if isinstance(error["input"], str) else "[...]"
            return f"a list was expected, such as {example:.200}"
        case "string_type" if type(error["input"]) in (int, float):
            return f"text was expected: in quotes, {json.dumps(str(error['input']))}"
    reason = error["msg"].removeprefix("Value error, ")
    return reason[:1].lower() + reason[1:]


def _example(section: type[BaseModel] | None, error: ErrorDetails) -> str:
    """Returns an example of a section for a value in its place, as in `workers: 16`: the first key
    that accepts the value, with it. Without such a key, returns the names of all keys."""
    if section is None:
        return ""
    if isinstance(error["input"], str | int):
        for name, field in section.model_fields.items():
            example = {field.alias or name: error["input"]}
            try:
                section.model_validate(example)
            except ValueError:
                continue
            return f", such as {json.dumps(example):.200}"
    return f": {', '.join(_allowed_keys(section, []))}"


def _place_hint(model: type[BaseModel], name: str) -> str:
    """Suggests where in the document a key of that name belongs; empty if nowhere."""
    places = sorted(_paths_of(model, name, ""), key=lambda path: path.count("."))
    return f" (did you mean {places[0]!r}?)" if places else ""


def _paths_of(section: type[BaseModel], name: str, prefix: str) -> Iterator[str]:
    for key, field in section.model_fields.items():
        path = prefix + (field.alias or key)
        if path.endswith(f".{name}"):
            yield path
        if inner := nested_section(field.annotation):
            yield from _paths_of(inner, name, f"{path}.")


def _allowed_keys(model: type[BaseModel], path: list[str]) -> list[str]:
    """Returns the keys that the document allows at `path`."""
    section = _section_at(model, path)
    if section is None:
        return []
    return sorted(field.alias or name for name, field in section.model_fields.items())


def _section_at(model: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = model
    for part in path:
        field = section.model_fields.get(part) if section else None
        section = nested_section(field.annotation) if field else None
    return section


def nested_section(annotation: Any) -> type[BaseModel] | None:
    """Returns the model of a field that is a section or an optional section, else None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(nested_section, get_args(annotation))), None)

"""`rayzero config explain` (every key, its value and source), and the JSON schema for editors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rayzero.engine.config.checks import DEFAULTS, find_without_effect, is_in_force
from rayzero.engine.config.keys import IMPLEMENTED, NO_OP, KeyStatus
from rayzero.engine.config.model import FREE_FORM_SECTIONS, KEY_GROUPS, KEYS, EngineConfig
from rayzero.engine.config.normalize import OLD_NAMES, SHORTHANDS, get_path
from rayzero.engine.config.parse import ParsedConfig
from rayzero.engine.validation import repr_value

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeyInfo:
    """One key of a config."""

    group: str  # subject
    key: str  # path
    status: KeyStatus
    value: Any  # effective value, JSON-compatible
    source: str  # "file", "default", or how the value was derived
    in_force: bool  # whether the key has an effect in this config
    what: str  # what the key requests
    reason: str  # why it has no effect or would be refused; empty for an implemented key


def key_infos(parsed: ParsedConfig) -> Iterator[KeyInfo]:
    """Yields an entry for every ignored key, then for every known key, in the order of
    `KEY_GROUPS`, and for every parameter of the optimizer and the schedule."""
    dump = parsed.config.model_dump(mode="json")
    for path in parsed.ignored:
        unknown = "an unknown key"
        yield KeyInfo(
            "unknown", path, NO_OP, None, "file", False, unknown, "ignored, as DeepSpeed ignores it"
        )
    for group, keys in KEY_GROUPS.items():
        for key in keys:
            if key.path in ("optimizer", "scheduler"):
                continue
            paths = _param_paths(key.path, parsed) if key.path in FREE_FORM_SECTIONS else [key.path]
            for path in paths:
                value, written = get_path(dump, path), get_path(parsed.document, path)
                source = parsed.provenance.get(path) or ("default" if written is None else "file")
                force = key.status is IMPLEMENTED and value is not None and is_in_force(dump, path)
                yield KeyInfo(
                    group, path, key.status, value, source, force, key.description, key.reason
                )


def _param_paths(section: str, parsed: ParsedConfig) -> list[str]:
    """Returns the paths of the params that the config contains, also of those that "auto" left
    out."""
    given = [f"{section}.{name}" for name in get_path(parsed.document, section) or {}]
    derived = [path for path in parsed.provenance if path.startswith(f"{section}.")]
    return [path for path in dict.fromkeys([*given, *derived]) if path not in KEYS]


def is_set_or_active(info: KeyInfo) -> bool:
    """Returns whether the key is in force, or the config contains it."""
    return info.source != "default" or (info.in_force and info.status is IMPLEMENTED)


def log_explanation(parsed: ParsedConfig) -> None:
    """Logs derived values, and no-op keys that differ from their defaults; once per process."""
    dump = parsed.config.model_dump(mode="json")
    if parsed.ignored:
        keys = ", ".join(f"{key:.60}" for key in parsed.ignored[:20])
        text = f"config: unknown keys are ignored, as DeepSpeed ignores them: {keys}"
        _log_once(text, logging.WARNING)
    for line in find_without_effect(parsed.config):
        _log_once(f"config: {line}", logging.WARNING)
    for path, how in parsed.provenance.items():
        _log_once(f"config: {path} is {repr_value(get_path(dump, path))} ({how})")
    idle = [
        path
        for path, key in KEYS.items()
        if key.status is NO_OP
        and path not in parsed.provenance
        and get_path(parsed.document, path) is not None
        and get_path(dump, path) != get_path(DEFAULTS, path)
    ]
    if idle:
        _log_once(f"config: no effect here: {', '.join(idle)} (`rayzero config explain` says why)")


@lru_cache(maxsize=256)
def _log_once(line: str, level: int = logging.INFO) -> None:
    log.log(level, "%s", line)


# Bounds that follow a validator have pydantic's names in the schema, not JSON Schema's. Upper
# bounds keep theirs, which has no meaning: they are those of 64-bit integers, and infinity, which
# stands for the largest, must be accepted.
_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum"}
_NUMBER = r"^(auto|[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)([eE][-+]?[0-9]+)?|[-+]?[Ii]nf(inity)?)$"


def json_schema() -> dict[str, Any]:
    """Returns a JSON schema (draft 2020-12) that accepts every type that the parser accepts."""
    schema = EngineConfig.model_json_schema(mode="validation")
    sections = schema.pop("$defs", {})
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "rayzero engine config"
    _inline_refs(schema, sections)
    _loosen(schema, "")
    for key in KEYS.values():
        _describe_property(schema, key.path, {"description": key.text})
    for name in OLD_NAMES:
        text = f"The old name of {name.new}."
        _describe_property(schema, name.old, {"description": text, "deprecated": True})
    return schema


def _inline_refs(node: Any, sections: dict[str, Any]) -> None:
    """Replaces references by their sections; each section is referenced once."""
    if isinstance(node, dict):
        if isinstance(name := node.pop("$ref", None), str):
            node |= sections[name.rsplit("/", 1)[-1]]
        for inner in node.values():
            _inline_refs(inner, sections)
    elif isinstance(node, list):
        for inner in node:
            _inline_refs(inner, sections)


def _loosen(node: dict[str, Any], path: str) -> None:
    """Accepts "auto" and null for every key, text for numbers, and booleans for some sections."""
    for name, inner in list(node.get("properties", {}).items()):
        full = f"{path}{name}"
        if full not in FREE_FORM_SECTIONS:
            for option in [inner, *inner.get("anyOf", [])]:
                _loosen(option, f"{full}.")
        inner.pop("title", None)
        described = {"description": inner.pop("description")} if "description" in inner else {}
        default = {"default": inner.pop("default")} if "default" in inner else {}
        options: list[dict[str, Any]] = [*inner.get("anyOf", [inner])]
        if any(option.get("type") in ("integer", "number") for option in options):
            for option in options:  # sizes may be written as `15099494.4`
                if option.get("type") == "integer":
                    option["type"] = "number"
                for bound in sorted(_BOUNDS.keys() & option.keys()):
                    option[_BOUNDS[bound]] = option.pop(bound)
            options.append({"type": "string", "pattern": _NUMBER})
        if full in SHORTHANDS:
            options.append({"type": "boolean"})
        options += [{"type": "null"}, {"const": "auto"}]
        node["properties"][name] = {"anyOf": options} | default | described


def _describe_property(schema: dict[str, Any], path: str, text: dict[str, Any]) -> None:
    """Describes the property at `path`; creates it where the model has no such field."""
    node = schema
    *outer, last = path.split(".")
    for part in outer:
        options = node["properties"][part]["anyOf"]
        node = next(option for option in options if option.get("type") == "object")
    node.setdefault("properties", {}).setdefault(last, {}).update(text)

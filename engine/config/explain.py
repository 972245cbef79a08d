"""`config explain`, JSON schema.

What is in force: every key with its status, its value, and where the value came from.

The JSON schema of a config, for editors: every known key, with what it asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rayzero.engine.config.checks import get_field, is_in_force
from rayzero.engine.config.key_table import FREE_FORM_SECTIONS, KEY_GROUPS, KEYS
from rayzero.engine.config.keys import IMPLEMENTED, NO_OP, Key, KeyStatus
from rayzero.engine.config.model import EngineConfig
from rayzero.engine.config.normalize import OLD_NAMES, SHORTHANDS, get_path
from rayzero.engine.config.parse import ParsedConfig
from rayzero.engine.validation import repr_value

log = logging.getLogger(__name__)

_MISSING = object()


_DEFAULT_CONFIG = EngineConfig()


@dataclass(frozen=True)
class KeyInfo:
    """One key of a config.

    Attributes:
        group: what it is about.
        key: its path.
        status: what becomes of it.
        value: what holds, as JSON knows it.
        source: "file", "default", or how the value came to be.
        in_force: whether it has an effect in this config.
        what: what the key asks for.
        reason: why it does nothing or would be refused; empty for an implemented key.
    """

    group: str
    key: str
    status: KeyStatus
    value: Any
    source: str
    in_force: bool
    what: str
    reason: str


def key_infos(parsed: ParsedConfig) -> Iterator[KeyInfo]:
    """A fact for every row of the table, in its order, and for every parameter of the optimizer
    and the schedule."""
    dump = parsed.config.model_dump(mode="json")
    for group, keys in KEY_GROUPS.items():
        for key in keys:
            if key.path in FREE_FORM_SECTIONS:
                yield from _param_infos(group, key, parsed, dump)
            elif key.is_active is not None or not _is_section(key.path):
                yield _key_info(group, key, parsed, dump)


def is_set_or_active(fact: KeyInfo) -> bool:
    """Whether the key is in force, or somebody wrote it."""
    return fact.source != "default" or (fact.in_force and fact.status is IMPLEMENTED)


def log_explanation(parsed: ParsedConfig) -> None:
    """Logs, once a process, what a config became that its text does not say."""
    for path, how in parsed.provenance.items():
        _log_once(f"config: {path} is {repr_value(_current_value(parsed, path))} ({how})")
    if idle := [one.key for one in key_infos(parsed) if _is_ineffective(one)]:
        _log_once(f"config: no effect here: {', '.join(idle)} (`rayzero config explain` says why)")


@lru_cache(maxsize=256)
def _log_once(line: str) -> None:
    log.info("%s", line)


def _is_ineffective(fact: KeyInfo) -> bool:
    """A no-op key that was written with another value than its default."""
    return (
        fact.status is NO_OP
        and fact.source == "file"
        and fact.value != get_field(_DEFAULT_CONFIG, fact.key)
    )


def _key_info(group: str, key: Key, parsed: ParsedConfig, dump: dict[str, Any]) -> KeyInfo:
    value = get_path(dump, key.path)
    written = get_path(dict(parsed.document), key.path, _MISSING)
    if key.is_active is not None and written is not _MISSING:
        value = written
    source = parsed.provenance.get(key.path) or (
        "default" if written in (_MISSING, None) else "file"
    )
    force = key.status is IMPLEMENTED and value is not None and is_in_force(parsed.config, key.path)
    return KeyInfo(group, key.path, key.status, value, source, force, key.description, key.reason)


def _param_infos(
    group: str, key: Key, parsed: ParsedConfig, dump: dict[str, Any]
) -> Iterator[KeyInfo]:
    paths = [f"{key.path}.{name}" for name in get_path(dump, key.path) or {}]
    left_out = [path for path in parsed.provenance if path.startswith(f"{key.path}.")]
    for path in dict.fromkeys([*paths, *left_out]):
        source = parsed.provenance.get(path, "file")
        yield KeyInfo(
            group, path, key.status, get_path(dump, path), source, True, key.description, key.reason
        )


def _current_value(parsed: ParsedConfig, path: str) -> Any:
    value = get_path(parsed.config.model_dump(mode="json"), path, _MISSING)
    return get_path(dict(parsed.document), path) if value is _MISSING else value


def _is_section(path: str) -> bool:
    return path in ("optimizer", "scheduler")


_NUMERIC_TYPES = {"integer", "number"}


def json_schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) that takes what the parser takes, as far as types go."""
    made = EngineConfig.model_json_schema(mode="validation")
    sections = made.pop("$defs", {})
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["title"] = "rayzero engine config"
    _inline_refs(made, sections)
    _loosen(made, "")
    for key in KEYS.values():
        _describe_property(made, key.path, {}, key.text)
    for one in OLD_NAMES:
        _describe_property(made, one.old, {"deprecated": True}, f"The old name of {one.new}.")
    return made


def _inline_refs(node: Any, sections: dict[str, Any]) -> None:
    """Puts sections in the place of references to them: each stands in one place only."""
    if isinstance(node, dict):
        if isinstance(name := node.pop("$ref", None), str):
            node |= sections[name.rsplit("/", 1)[-1]]
        for inner in node.values():
            _inline_refs(inner, sections)
    elif isinstance(node, list):
        for inner in node:
            _inline_refs(inner, sections)


def _loosen(node: dict[str, Any], path: str) -> None:
    """Lets every key be "auto" or null, a number be text, and some sections a boolean."""
    for name, inner in list(node.get("properties", {}).items()):
        here = f"{path}{name}"
        if here not in FREE_FORM_SECTIONS:
            for option in [inner, *inner.get("anyOf", [])]:
                _loosen(option, f"{here}.")
        inner.pop("title", None)
        described = {"description": inner.pop("description")} if "description" in inner else {}
        default = {"default": inner.pop("default")} if "default" in inner else {}
        options: list[dict[str, Any]] = [*inner.get("anyOf", [inner])]
        kinds = {option.get("type") for option in options}
        if kinds & _NUMERIC_TYPES:
            options = [*map(_allow_fraction, options), {"type": "string"}]
        if any(short.path == here for short in SHORTHANDS):
            options.append({"type": "boolean"})
        options += [{"type": "null"}, {"const": "auto"}]
        node["properties"][name] = {"anyOf": options} | default | described


def _allow_fraction(option: dict[str, Any]) -> dict[str, Any]:
    """Sizes may be written as `15099494.4`."""
    return option | {"type": "number"} if option.get("type") == "integer" else option


def _describe_property(made: dict[str, Any], path: str, empty: dict[str, Any], text: str) -> None:
    """Describes the property at `path`, which is made where the model has none."""
    here = made
    *outer, last = path.split(".")
    for part in outer:
        found = here.setdefault("properties", {}).setdefault(part, {})
        options = [one for one in found.get("anyOf", [found]) if one.get("type") == "object"]
        here = options[0] if options else found
    properties = here.setdefault("properties", {})
    properties[last] = properties.get(last, dict(empty)) | {"description": text}

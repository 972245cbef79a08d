"""The JSON schema of a config, for editors: every known key, with what it asks for."""

from __future__ import annotations

from typing import Any

from rayzero.engine.config.document import EngineConfig
from rayzero.engine.config.keys.rows import Key
from rayzero.engine.config.keys.table import KEYS
from rayzero.engine.config.old_names import OLD_NAMES, SHORTS
from rayzero.engine.config.sift import FREE

_NUMBERS = {"integer", "number"}


def schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) that takes what the parser takes, as far as types go."""
    made = EngineConfig.model_json_schema(mode="validation")
    sections = made.pop("$defs", {})
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["title"] = "rayzero engine config"
    _inline(made, sections)
    _loosen(made, "")
    for key in KEYS.values():
        _add(made, key.path, {}, _told(key))
    for one in OLD_NAMES:
        _add(made, one.old, {"deprecated": True}, f"The old name of {one.new}.")
    return made


def _inline(node: Any, sections: dict[str, Any]) -> None:
    """Puts sections in the place of references to them: each stands in one place only."""
    if isinstance(node, dict):
        if isinstance(name := node.pop("$ref", None), str):
            node |= sections[name.rsplit("/", 1)[-1]]
        for inner in node.values():
            _inline(inner, sections)
    elif isinstance(node, list):
        for inner in node:
            _inline(inner, sections)


def _loosen(node: dict[str, Any], path: str) -> None:
    """Lets every key be "auto" or null, a number be text, and some sections a boolean."""
    for name, inner in list(node.get("properties", {}).items()):
        here = f"{path}{name}"
        if here not in FREE:
            for option in [inner, *inner.get("anyOf", [])]:
                _loosen(option, f"{here}.")
        inner.pop("title", None)
        described = {"description": inner.pop("description")} if "description" in inner else {}
        default = {"default": inner.pop("default")} if "default" in inner else {}
        options: list[dict[str, Any]] = [*inner.get("anyOf", [inner])]
        kinds = {option.get("type") for option in options}
        if kinds & _NUMBERS:
            options = [*map(_fractional, options), {"type": "string"}]
        if any(short.path == here for short in SHORTS):
            options.append({"type": "boolean"})
        options += [{"type": "null"}, {"const": "auto"}]
        node["properties"][name] = {"anyOf": options} | default | described


def _fractional(option: dict[str, Any]) -> dict[str, Any]:
    """Sizes may be written as `15099494.4`."""
    return option | {"type": "number"} if option.get("type") == "integer" else option


def _told(key: Key) -> str:
    text = f"{key.what[:1].upper()}{key.what[1:]}."
    if key.reason:
        use = f" Use {key.use}." if key.use else ""
        text += f" {str(key.status).capitalize()}: {key.reason}.{use}"
    return text


def _add(made: dict[str, Any], path: str, empty: dict[str, Any], text: str) -> None:
    """Describes the property at `path`, which is made where the model has none."""
    here = made
    *outer, last = path.split(".")
    for part in outer:
        found = here.setdefault("properties", {}).setdefault(part, {})
        options = [one for one in found.get("anyOf", [found]) if one.get("type") == "object"]
        here = options[0] if options else found
    properties = here.setdefault("properties", {})
    properties[last] = properties.get(last, dict(empty)) | {"description": text}

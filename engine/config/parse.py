"""Parses a config: source (dict, JSON or Hjson file, base64) -> plain values -> `EngineConfig`.

`ParsedConfig` also has the provenance of each derived value.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import hjson

from rayzero.engine.config.auto import fill_total_steps, resolve_auto
from rayzero.engine.config.checks import find_conflicts, refused_fields, split_known_keys
from rayzero.engine.config.model import EngineConfig, find_param_errors
from rayzero.engine.config.normalize import expand_shorthand, rename_old_keys
from rayzero.engine.errors import ConfigError
from rayzero.engine.validation import raise_config_error, validate_model

_MAX_DEPTH = 32
_MAX_INTEGER_BITS = 1023  # the range of a float


def to_plain(value: Any, what: str, path: tuple[str, ...] = ()) -> Any:
    """A copy of `value` made of dicts, lists, text, numbers, booleans and None.

    Args:
        value: a document, or a part of it.
        what: the document's name in messages.
        path: of the part in the document.

    Raises:
        ConfigError: a value has another type, a key is not text, or the nesting is too deep.
    """
    if len(path) > _MAX_DEPTH:
        raise ConfigError(
            f"{what}: {'.'.join(path[:4])}...: nested too deeply",
            allowed=f"{_MAX_DEPTH} levels",
        )
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(
                    f"{what}: {'.'.join(path) or '(top level)'}: a key is not text, but a "
                    f"{type(key).__name__}"
                )
            _check_text(key, what, ".".join(path) or "(top level)")
        return {str(key): to_plain(inner, what, (*path, key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(inner, what, (*path, str(i))) for i, inner in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _check_text(value, what, ".".join(path))
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    return _to_number(value, what, ".".join(path))


def _check_text(value: str, what: str, path: str) -> str:
    """Rejects lone surrogates, which can be neither printed nor written to a file."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{what}: {path}: {value!a} is not text") from None
    return str(value)


def _to_number(value: Any, what: str, path: str) -> int | float:
    """Converts any numeric type, such as numpy's."""
    if isinstance(value, Integral):
        whole = int(value)
        if whole.bit_length() > _MAX_INTEGER_BITS:
            raise ConfigError(f"{what}: {path}: a number of {whole.bit_length()} bits is too large")
        return whole
    if isinstance(value, Real):
        if math.isnan(value):
            raise ConfigError(f"{what}: {path}: a number was expected (seen: nan)")
        return float(value)
    raise ConfigError(
        f"{what}: {path}: a {type(value).__name__} is not allowed in a config",
        allowed="JSON types: mappings, lists, text, numbers, true, false and null",
    )


def read_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The config as a dict of plain values.

    Args:
        source: the dict; the path of a JSON or Hjson file; or, as launchers pass it, the text of
            one in base64, plain or URL-safe.

    Raises:
        ConfigError: the file is missing, is not Hjson, or contains values of other types.
    """
    what = describe_source(source)
    if isinstance(source, Mapping):
        value: Any = source
    elif isinstance(source, str | os.PathLike):
        text = _decode_base64(source)
        value = _load_hjson(_read_text(source) if text is None else text, what)
    else:
        raise ConfigError(
            f"engine config: a {type(source).__name__} was given",
            allowed="a dict, or the path of a JSON or Hjson file",
        )
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what}: a mapping of keys to values was expected")
    document: dict[str, Any] = to_plain(value, what)
    return document


def describe_source(source: object) -> str:
    """The document's name in messages."""
    if not isinstance(source, str | os.PathLike):
        return "engine config"
    if _decode_base64(source) is not None:
        return "engine config in base64"
    return f"engine config {os.fsdecode(source)!r}"


def _read_text(source: str | os.PathLike[str]) -> str:
    try:
        return Path(source).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"{describe_source(source)} cannot be read: {reason}",
            fix="`engine:` in the job file, or `config=`: the path of a DeepSpeed config file",
        ) from None


def _decode_base64(source: str | os.PathLike[str]) -> str | None:
    """The decoded text; None if `source` is a path."""
    if not isinstance(source, str) or _path_exists(source):
        return None
    code = "".join(source.split()).rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        decoded = base64.b64decode(code + "=" * (-len(code) % 4), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeError, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _path_exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except ValueError:  # a path cannot contain a null character
        return False


def _load_hjson(text: str, what: str) -> Any:
    """Tries JSON first: Hjson parses a line such as `a: 1, b: 2` as one string."""
    if not text.strip():
        raise ConfigError(f"{what} is empty", allowed="at least {}")
    try:
        return json.loads(text, object_pairs_hook=_reject_duplicates)
    except _DuplicateKeyError as error:
        raise ConfigError(f"{what} is not JSON or Hjson: {error}") from None
    except (ValueError, RecursionError):
        pass
    try:
        return hjson.loads(text, object_pairs_hook=_reject_duplicates)
    except RecursionError:
        raise ConfigError(f"{what} is not JSON or Hjson: it is nested too deeply") from None
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"{what} is not JSON or Hjson: {error}") from None


class _DuplicateKeyError(ValueError):
    """A mapping contains a key twice, so that one of the values would be ignored."""


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise _DuplicateKeyError(f"the key {twice[0]!r} is given twice")
    return seen


ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | EngineConfig


@dataclass(frozen=True)
class ParsedConfig:
    """A checked config and its provenance.

    Attributes:
        document: the given keys under their current names, without those that were left out.
        provenance: {path: how its value was derived}, for values from "auto", an old name, or a
            boolean in place of a section.
    """

    config: EngineConfig
    document: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)


def parse_config(source: ConfigSource | None) -> EngineConfig:
    """A checked config from any source; None is the config with every default.

    Raises:
        ConfigError: naming every wrong key.
    """
    return source if isinstance(source, EngineConfig) else parse_with_provenance(source).config


def parse_with_provenance(source: ConfigSource | None, steps: int | None = None) -> ParsedConfig:
    """As `parse_config`, with provenance.

    Args:
        steps: number of steps of the job; None outside a job.

    Raises:
        ConfigError: naming every wrong key.
    """
    if source is None:
        return ParsedConfig(EngineConfig())
    if isinstance(source, EngineConfig):
        if conflicts := list(find_conflicts(source)):
            raise_config_error(describe_source(source), conflicts)
        return ParsedConfig(source, source.model_dump(mode="json", exclude_unset=True))
    document, mistakes = deepcopy(fill_total_steps(read_config(source), steps)), list[str]()
    provenance = expand_shorthand(document)
    rename_old_keys(document, provenance, mistakes)
    resolve_auto(document, provenance, mistakes)
    config, invalid = validate_model(EngineConfig, split_known_keys(document, mistakes))
    mistakes += invalid
    if config is not None:
        mistakes += [*refused_fields(config), *find_conflicts(config)]
        mistakes += find_param_errors(config.optimizer, config.scheduler)
    if mistakes or config is None:
        raise_config_error(describe_source(source), mistakes)
    return ParsedConfig(config, document, provenance)

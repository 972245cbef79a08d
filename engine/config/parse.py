"""Parses a config: source (dict, JSON or Hjson file, base64) -> plain values -> `EngineConfig`.

`ParsedConfig` also has the provenance of each derived value.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from numbers import Integral, Real
from typing import Any

import hjson

from rayzero.engine.config.checks import find_conflicts, find_refused
from rayzero.engine.config.model import KEYS, EngineConfig, find_param_errors
from rayzero.engine.config.normalize import OLD_NAMES, fill_total_steps, get_path, normalize
from rayzero.engine.config.optimizers import OPTIMIZER_PARAMS
from rayzero.engine.config.schedules import LR_CURVES
from rayzero.engine.errors import ConfigError, did_you_mean
from rayzero.engine.validation import raise_config_error, validate_model

MAX_DOCUMENT_BYTES = 2**17  # of a file that a user writes
_MAX_DEPTH = 32
_MAX_INTEGER_BITS = 1023  # the range of a float
_STANDARD_INPUT = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | EngineConfig


def read_config(source: ConfigSource) -> dict[str, Any]:
    """Returns the config as a dict of plain values: dicts, lists, text, numbers, booleans, None.
    Raises ConfigError if the file is missing, is not Hjson, or contains values of other types.

    Args:
        source: the dict; the path of a JSON or Hjson file; or, as launchers pass it, the text of
            such a file in base64, plain or URL-safe.
    """
    return _read_named(source)[1]


def merge_config(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of `document` with `changes`: sections are merged, and None removes a key."""
    merged = dict(document)
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            section = merged.get(key)
            merged[key] = merge_config(section if isinstance(section, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def _read_named(source: ConfigSource) -> tuple[str, dict[str, Any]]:
    """Returns (the document's name in messages, its plain values)."""
    name, value = "engine config", source
    if isinstance(source, EngineConfig):
        value = source.model_dump(mode="json", exclude_unset=True)
    elif isinstance(source, str) and (text := _decode_base64(source)) is not None:
        name = "engine config in base64"
        value = _load_hjson(text, name)
    elif isinstance(source, str | os.PathLike):
        name = f"engine config {os.fsdecode(source)!r:.300}"
        fix = "`engine:` in the job file, or `config=`: the path of a DeepSpeed config file"
        value = _load_hjson(read_text(source, name, fix), name)
    elif not isinstance(source, Mapping):
        raise ConfigError(
            f"engine config: a {type(source).__name__} was given",
            allowed="a dict, or the path of a JSON or Hjson file",
        )
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: a mapping of keys to values was expected")
    return name, to_plain(value, name)


def to_plain(
    value: Any, name: str, max_depth: int = _MAX_DEPTH, allow_infinity: bool = True
) -> Any:
    """Returns a copy of `value`, made of plain values; `name` is the name of `value` in messages.
    Raises ConfigError for a value of another type, a NaN, a huge integer, text that is not Unicode,
    more than `max_depth` levels, or infinity where it is not allowed."""
    return _PlainCopier(name, max_depth, allow_infinity).copy(value, ())


@dataclass(frozen=True)
class _PlainCopier:
    name: str
    max_depth: int
    allow_infinity: bool

    def copy(self, value: Any, path: tuple[str, ...]) -> Any:
        """Returns a copy of `value`, the part of the document at `path`."""
        if len(path) > self.max_depth:
            raise self._error(path, "nested too deeply", f"{self.max_depth} levels")
        match value:
            case Enum():  # DeepSpeed's enums name devices, stages and dtypes by value
                return self.copy(value.value, path)
            case Mapping():
                return {
                    self._copy_key(key, path): self.copy(inner, (*path, key))
                    for key, inner in value.items()
                }
            case list() | tuple():
                return [self.copy(inner, (*path, str(i))) for i, inner in enumerate(value)]
            case None | bool():
                return value
            case str() | os.PathLike():
                return self._copy_text(os.fsdecode(value), path)
            case Integral():  # also numpy's
                if (bits := int(value).bit_length()) > _MAX_INTEGER_BITS:
                    raise self._error(path, f"a number of {bits} bits is too large")
                return int(value)
            case Real():
                if math.isnan(value) or (math.isinf(value) and not self.allow_infinity):
                    raise self._error(path, f"a finite number was expected (seen: {value})")
                return float(value)
            case _ if str(value).startswith("torch.") and type(value).__name__ == "dtype":
                return str(value)
            case _:
                raise self._error(
                    path,
                    f"a {type(value).__name__} is not allowed in a config",
                    "JSON types: mappings, lists, text, numbers, true, false and null",
                )

    def _copy_key(self, key: Any, path: tuple[str, ...]) -> str:
        if not isinstance(key, str):
            kind = type(key).__name__
            raise self._error(path, f"a key is not text, but a {kind}", "keys in quotes")
        return self._copy_text(key, path)

    def _copy_text(self, text: str, path: tuple[str, ...]) -> str:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # lone surrogates can be neither printed nor written to a file
            raise self._error(path, f"{text!a:.200} is not text") from None
        return str(text)

    def _error(self, path: tuple[str, ...], problem: str, allowed: str = "") -> ConfigError:
        parts = [part if part.isprintable() else ascii(part) for part in path]
        where = ".".join(f"{part:.60}" for part in parts[:8]) or "(top level)"
        return ConfigError(f"{self.name}: {where}: {problem}", allowed)


def read_text(path: str | os.PathLike[str], name: str, fix: str) -> str:
    """Returns the text of a file that a user wrote. Raises ConfigError if the file cannot be read,
    is no regular file, is too large, or is not UTF-8. Standard input may be a pipe, as in
    `rayzero run <(...)`."""

    def open_at_once(file: str, flags: int) -> int:  # a blocking open waits for a FIFO's writer
        return os.open(file, flags if is_input else flags | os.O_NONBLOCK)

    try:
        is_input = os.fsdecode(path).startswith(_STANDARD_INPUT)
        with open(path, "rb", opener=open_at_once) as file:
            if not (is_input or stat.S_ISREG(os.fstat(file.fileno()).st_mode)):
                raise ValueError("it is not a regular file")
            content = file.read(MAX_DOCUMENT_BYTES + 1)
        if len(content) > MAX_DOCUMENT_BYTES:
            raise ValueError(f"it has more than {MAX_DOCUMENT_BYTES} bytes")
        return content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, UnicodeDecodeError):
            reason = "it is not UTF-8 text"
        raise ConfigError(f"{name} cannot be read: {reason}", fix=fix) from None


def _decode_base64(source: str) -> str | None:
    """Returns the decoded text; None if `source` is a path."""
    if os.path.exists(source):
        return None
    code = "".join(source.split()).rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        decoded = base64.b64decode(code + "=" * (-len(code) % 4), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeError, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _load_hjson(text: str, name: str) -> Any:
    """Tries JSON first: Hjson parses a line such as `a: 1, b: 2` as one string."""
    if not text.strip():
        raise ConfigError(f"{name} is empty", allowed="at least {}")
    if len(text) > MAX_DOCUMENT_BYTES:
        raise ConfigError(f"{name} has more than {MAX_DOCUMENT_BYTES} characters")

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = Counter(key for key, _ in pairs)
        if twice := sorted(key for key, count in names.items() if count > 1):
            raise ConfigError(f"{name} is not JSON or Hjson: the key {twice[0]!r} is given twice")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=reject_duplicates)
    except ConfigError:
        raise
    except (ValueError, RecursionError):
        pass
    try:
        return hjson.loads(text, object_pairs_hook=reject_duplicates)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{name} is not JSON or Hjson: it is nested too deeply") from None
    except OverflowError:
        raise ConfigError(f"{name} has a number above a float's range, such as 1e999") from None
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"{name} is not JSON or Hjson: {error}") from None


@dataclass(frozen=True)
class ParsedConfig:
    """A checked config and its provenance."""

    config: EngineConfig
    document: Mapping[str, Any]  # the given keys under their current names
    provenance: Mapping[str, str]  # {path: how its value was derived}, see `normalize`
    ignored: Sequence[str] = ()  # unknown keys that DeepSpeed ignores, too


def parse_config(source: ConfigSource | None) -> EngineConfig:
    """Returns a checked config from any source; None stands for the config with every default.
    Raises ConfigError, which names every wrong key."""
    return source if isinstance(source, EngineConfig) else parse_with_provenance(source).config


def parse_with_provenance(source: ConfigSource | None, steps: int | None = None) -> ParsedConfig:
    """Parses as `parse_config` does, with provenance; `steps` is the number of steps of the job,
    if any."""
    name, document = _read_named({} if source is None else source)
    mistakes = list[str]()
    provenance = normalize(fill_total_steps(document, steps), mistakes)
    ignored = drop_unknown(document)
    mistakes += find_refused(document)
    config, invalid = validate_model(EngineConfig, document)
    mistakes += invalid
    if config is not None:
        mistakes += [*find_conflicts(config), *find_param_errors(config)]
    if mistakes or config is None:
        raise_config_error(name, mistakes)
    return ParsedConfig(config, document, provenance, ignored)


_IGNORING_SECTIONS = (
    "",
    "optimizer",
    "scheduler",
    "torch_autocast",
    "data_types",
    "activation_checkpointing",
    "checkpoint",
)
"""Sections in which DeepSpeed ignores unknown keys, because it reads them key by key. It validates
the other sections as a whole."""

_PARAMS = {
    f"{section}.{param}"
    for section, models in (("optimizer", OPTIMIZER_PARAMS), ("scheduler", LR_CURVES))
    for model in models.values()
    for param in model.model_fields
}
"""Paths of params written next to `params`, by mistake. They are refused: dropped as unknown keys,
they would have no effect on the training."""

_FOREIGN = {"fp16_opt_level"}
"""Keys of other libraries (Apex) in public configs: dropped, although they resemble a known key."""

_PATHS = {*KEYS, *(name.old for name in OLD_NAMES)}


@cache
def _names_in(section: str) -> frozenset[str]:
    prefix = f"{section}." if section else ""
    return frozenset(
        path.removeprefix(prefix).partition(".")[0] for path in _PATHS if path.startswith(prefix)
    )


def drop_unknown(document: dict[str, Any]) -> list[str]:
    """Removes the unknown keys that DeepSpeed ignores from a document, in place; returns their
    paths. A key that resembles a known key, or belongs to another section, stays, so that
    validation refuses it."""
    dropped = []
    for section in _IGNORING_SECTIONS:
        values = get_path(document, section) if section else document
        known = _names_in(section)
        for name in [*values] if isinstance(values, dict) else ():
            path = f"{section}.{name}" if section else name
            if name in known or path in _PARAMS or _belongs_elsewhere(name):
                continue
            near = sorted(_PATHS) if "." in name else sorted(known)
            if did_you_mean(name, near) and name not in _FOREIGN:
                continue
            del values[name]
            dropped.append(path)
    return dropped


def _belongs_elsewhere(name: str) -> bool:
    return any(path.endswith(f".{name}") for path in _PATHS)

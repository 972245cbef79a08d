"""From what a user gave to a dict: a dict, a file of JSON or Hjson, or base64 of one."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson

from rayzero.engine.config.plain import plain
from rayzero.engine.errors import ConfigError


def read_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The config as a dict of plain values.

    Args:
        source: the dict; the path of a JSON or Hjson file; or, as launchers hand it over, the
            text of one in base64, plain or URL-safe.

    Raises:
        ConfigError: the file is missing, or is not Hjson, or holds what a config cannot.
    """
    what = describe(source)
    if isinstance(source, Mapping):
        value: Any = source
    elif isinstance(source, str | os.PathLike):
        text = _decoded(source)
        value = _parsed(_read(source) if text is None else text, what)
    else:
        raise ConfigError(
            f"engine config: a {type(source).__name__} was given",
            allowed="a dict, or the path of a JSON or Hjson file",
        )
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what}: a mapping of keys to values was expected")
    document: dict[str, Any] = plain(value, what)
    return document


def describe(source: object) -> str:
    """What the document is called in messages."""
    if not isinstance(source, str | os.PathLike):
        return "engine config"
    if _decoded(source) is not None:
        return "engine config in base64"
    return f"engine config {os.fsdecode(source)!r}"


def _read(source: str | os.PathLike[str]) -> str:
    try:
        return Path(source).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"{describe(source)} cannot be read: {reason}",
            fix="`engine:` in the job file, or `config=`: the path of a DeepSpeed config file",
        ) from None


def _decoded(source: str | os.PathLike[str]) -> str | None:
    """The text that is in base64 here; None if it is a path."""
    if not isinstance(source, str) or _exists(source):
        return None
    code = "".join(source.split()).rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        decoded = base64.b64decode(code + "=" * (-len(code) % 4), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeError, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except ValueError:  # a path cannot hold a null
        return False


def _parsed(text: str, what: str) -> Any:
    """JSON is tried first: Hjson reads a line such as `a: 1, b: 2` as one long text."""
    if not text.strip():
        raise ConfigError(f"{what} is empty", allowed="at least {}")
    try:
        return json.loads(text, object_pairs_hook=_no_twice)
    except _TwiceError as error:
        raise ConfigError(f"{what} is not JSON or Hjson: {error}") from None
    except (ValueError, RecursionError):
        pass
    try:
        return hjson.loads(text, object_pairs_hook=_no_twice)
    except RecursionError:
        raise ConfigError(f"{what} is not JSON or Hjson: it is nested too deeply") from None
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"{what} is not JSON or Hjson: {error}") from None


class _TwiceError(ValueError):
    """A key stands in one mapping twice, so one of its values would be ignored."""


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise _TwiceError(f"the key {twice[0]!r} stands there twice")
    return seen

"""From what a user gave to a dict: a dict, or a file of JSON or Hjson."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hjson

from rayzero.engine.errors import ConfigError


def read_config(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    """The config as a dict, from a dict or from a JSON or Hjson file.

    Raises:
        ConfigError: the file is missing, or is not Hjson.
    """
    if isinstance(source, dict):
        return source
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"engine config: a {type(source).__name__} was given",
            allowed="a dict, or the path of a JSON or Hjson file",
        )
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"engine config {str(path)!r} cannot be read: {reason}",
            fix="`engine:` in the job file, or `config=`: the path of a DeepSpeed config file",
        ) from None
    try:
        value = hjson.loads(text, object_pairs_hook=_no_twice)
    except (hjson.HjsonDecodeError, ValueError) as error:
        raise ConfigError(f"engine config {str(path)!r} is not JSON or Hjson: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"engine config {str(path)!r}: a mapping of keys to values was expected")
    return value


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the key {twice[0]!r} stands there twice")
    return seen

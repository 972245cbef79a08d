"""A document as plain values: what JSON knows, and no deeper or larger than a config can be."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from rayzero.engine.errors import ConfigError

_DEPTH = 32
_BITS = 1023  # what a float can hold


def plain(value: Any, what: str, path: tuple[str, ...] = ()) -> Any:
    """A copy of `value` in dicts, lists, text, numbers, booleans and None.

    Args:
        value: a document, or a part of it.
        what: what the document is called in messages.
        path: where the part stands in it.

    Raises:
        ConfigError: something else is in it, a key is not text, or it is nested too deeply.
    """
    if len(path) > _DEPTH:
        raise ConfigError(
            f"{what}: {'.'.join(path[:4])}...: nested too deeply",
            allowed=f"{_DEPTH} levels",
        )
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(
                    f"{what}: {'.'.join(path) or '(top level)'}: a key is not text, but a "
                    f"{type(key).__name__}"
                )
            _text(key, what, ".".join(path) or "(top level)")
        return {str(key): plain(inner, what, (*path, key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, what, (*path, str(i))) for i, inner in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, what, ".".join(path))
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    return _number(value, what, ".".join(path))


def _text(value: str, what: str, path: str) -> str:
    """Half of a surrogate pair can be neither printed nor written to a file."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{what}: {path}: {value!a} is not text") from None
    return str(value)


def _number(value: Any, what: str, path: str) -> int | float:
    """Numbers of other libraries, such as numpy's, are numbers too."""
    if isinstance(value, Integral):
        whole = int(value)
        if whole.bit_length() > _BITS:
            raise ConfigError(f"{what}: {path}: a number of {whole.bit_length()} bits is too large")
        return whole
    if isinstance(value, Real):
        if math.isnan(value):
            raise ConfigError(f"{what}: {path}: a number was expected (seen: nan)")
        return float(value)
    raise ConfigError(
        f"{what}: {path}: a {type(value).__name__} cannot stand in a config",
        allowed="what JSON knows: mappings, lists, text, numbers, true, false and null",
    )

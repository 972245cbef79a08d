"""What must not be told: values that look like secrets, and credentials in URLs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

HIDDEN = "***"

_CREDENTIALS = re.compile(r"(?<=://)[^/\s@\"']+@")
_OPTIONS = re.compile(
    r"(?i)([?&][^=&\s\"]*(?:key|secret|token|signature|password)[^=&\s\"]*=)[^&\s\"]+"
)
_WORDS = frozenset(
    [
        "password",
        "passwd",
        "secret",
        "secrets",
        "token",
        "credential",
        "credentials",
        "apikey",
        "auth",
    ]
)
_PAIRS = frozenset({("api", "key"), ("access", "key"), ("private", "key"), ("account", "key")})
_MARKS = frozenset(["bos", "eos", "pad", "unk", "mask", "sep", "cls"])  # tokens of a vocabulary


def masked(text: str) -> str:
    """A text without the credentials of URLs in it."""
    return _OPTIONS.sub(rf"\1{HIDDEN}", _CREDENTIALS.sub(f"{HIDDEN}@", text))


def redacted(value: Any, key: str = "") -> Any:
    """Plain data without secrets: texts under a key that says so, and credentials in URLs."""
    if isinstance(value, Mapping):
        return {name: redacted(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(one, key) for one in value]
    if isinstance(value, str):
        return HIDDEN if value and is_secret(key) else masked(value)
    return value


def hidden(value: Any, path: str = "") -> Iterator[str]:
    """The dotted keys of what was taken out."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from hidden(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for one in value:
            yield from hidden(one, path)
    elif isinstance(value, str) and HIDDEN in value:
        yield path


def is_secret(key: str) -> bool:
    """Whether what stands under a key of that name must not be told."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower())
    if _MARKS & set(words):
        return False
    pairs = set(pairwise(words))
    return bool(_WORDS & set(words) or _PAIRS & pairs)

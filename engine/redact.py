"""What must not be told: values that look like secrets, and credentials in URLs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

REDACTED = "***"

_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s@\"']+@")


_SECRET_URL_OPTIONS = re.compile(
    r"(?i)([?&][^=&\s\"]*(?:key|secret|token|signature|password)[^=&\s\"]*=)[^&\s\"]+"
)


_SECRET_WORDS = frozenset(
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


_SECRET_WORD_PAIRS = frozenset(
    {("api", "key"), ("access", "key"), ("private", "key"), ("account", "key")}
)


_VOCABULARY_TOKENS = frozenset(
    ["bos", "eos", "pad", "unk", "mask", "sep", "cls"]
)  # tokens of a vocabulary


def redact_url(text: str) -> str:
    """A text without the credentials of URLs in it."""
    return _SECRET_URL_OPTIONS.sub(rf"\1{REDACTED}", _URL_CREDENTIALS.sub(f"{REDACTED}@", text))


def redact_document(value: Any, key: str = "") -> Any:
    """Plain data without secrets: texts under a key that says so, and credentials in URLs."""
    if isinstance(value, Mapping):
        return {name: redact_document(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact_document(one, key) for one in value]
    if isinstance(value, str):
        return REDACTED if value and is_secret_key(key) else redact_url(value)
    return value


def redacted_keys(value: Any, path: str = "") -> Iterator[str]:
    """The dotted keys of what was taken out."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from redacted_keys(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for one in value:
            yield from redacted_keys(one, path)
    elif isinstance(value, str) and REDACTED in value:
        yield path


def is_secret_key(key: str) -> bool:
    """Whether what stands under a key of that name must not be told."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower())
    if _VOCABULARY_TOKENS & set(words):
        return False
    pairs = set(pairwise(words))
    return bool(_SECRET_WORDS & set(words) or _SECRET_WORD_PAIRS & pairs)

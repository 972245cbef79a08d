"""Redaction of secrets: values under secret-looking keys, and credentials in URLs."""

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
_SECRET_WORDS = set(
    "password passwd secret secrets token credential credentials apikey auth".split()
)
_SECRET_WORD_PAIRS = {(word, "key") for word in ("api", "access", "private", "account")}
_VOCABULARY_TOKENS = {"bos", "eos", "pad", "unk", "mask", "sep", "cls"}


def redact_url(text: str) -> str:
    """Returns the text with credentials in URLs redacted."""
    if "://" in text:  # a fast test: every line of a job's log is redacted
        text = _URL_CREDENTIALS.sub(f"{REDACTED}@", text)
    if "=" in text and ("?" in text or "&" in text):
        text = _SECRET_URL_OPTIONS.sub(rf"\1{REDACTED}", text)
    return text


def redact_document(value: Any, key: str = "", levels: int = 200) -> Any:
    """Returns plain data in which texts under secret keys, and credentials in URLs, are redacted.
    Containers below `levels` levels are left out; documents that were read have fewer levels."""
    if isinstance(value, Mapping | list | tuple) and levels == 0:
        return "..."
    if isinstance(value, Mapping):
        return {
            name: redact_document(inner, str(name), levels - 1) for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_document(item, key, levels - 1) for item in value]
    if isinstance(value, str):
        return REDACTED if value and is_secret_key(key) else redact_url(value)
    return value


def redacted_keys(value: Any, path: str = "") -> Iterator[str]:
    """Yields the dotted keys of redacted values."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from redacted_keys(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from redacted_keys(item, path)
    elif isinstance(value, str) and REDACTED in value:
        yield path


def is_secret_key(key: str) -> bool:
    """Returns whether values under a key of that name are secrets."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower())
    if _VOCABULARY_TOKENS & set(words):
        return False
    pairs = set(pairwise(words))
    return bool(_SECRET_WORDS & set(words) or _SECRET_WORD_PAIRS & pairs)

"""What is in force: every key with its status, its value, and where the value came from."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rayzero.engine.config.document import EngineConfig
from rayzero.engine.config.keys.rows import IMPLEMENTED, NO_OP, Key, Status
from rayzero.engine.config.keys.table import GROUPS
from rayzero.engine.config.parse import Parsed
from rayzero.engine.config.paths import find
from rayzero.engine.config.sift import FREE, field, in_force
from rayzero.engine.validation import shown

log = logging.getLogger(__name__)

_MISSING = object()
_DEFAULTS = EngineConfig()


@dataclass(frozen=True)
class Fact:
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
    status: Status
    value: Any
    source: str
    in_force: bool
    what: str
    reason: str


def facts(parsed: Parsed) -> Iterator[Fact]:
    """A fact for every row of the table, in its order, and for every parameter of the optimizer
    and the schedule."""
    dump = parsed.config.model_dump(mode="json")
    for group, keys in GROUPS.items():
        for key in keys:
            if key.path in FREE:
                yield from _params(group, key, parsed, dump)
            elif key.asks is not None or not _is_section(key.path):
                yield _fact(group, key, parsed, dump)


def given(fact: Fact) -> bool:
    """Whether the key is in force, or somebody wrote it."""
    return fact.source != "default" or (fact.in_force and fact.status is IMPLEMENTED)


def tell(parsed: Parsed) -> None:
    """Logs, once a process, what a config became that its text does not say."""
    for path, how in parsed.told.items():
        _once(f"config: {path} is {shown(_value(parsed, path))} ({how})")
    if idle := [one.key for one in facts(parsed) if _idle(one)]:
        _once(f"config: no effect here: {', '.join(idle)} (`rayzero config explain` says why)")


@lru_cache(maxsize=256)
def _once(line: str) -> None:
    log.info("%s", line)


def _idle(fact: Fact) -> bool:
    """A no-op key that was written with another value than its default."""
    return (
        fact.status is NO_OP and fact.source == "file" and fact.value != field(_DEFAULTS, fact.key)
    )


def _fact(group: str, key: Key, parsed: Parsed, dump: dict[str, Any]) -> Fact:
    value = find(dump, key.path)
    written = find(dict(parsed.document), key.path, _MISSING)
    if key.asks is not None and written is not _MISSING:
        value = written
    source = parsed.told.get(key.path) or ("default" if written in (_MISSING, None) else "file")
    force = key.status is IMPLEMENTED and value is not None and in_force(parsed.config, key.path)
    return Fact(group, key.path, key.status, value, source, force, key.what, key.reason)


def _params(group: str, key: Key, parsed: Parsed, dump: dict[str, Any]) -> Iterator[Fact]:
    paths = [f"{key.path}.{name}" for name in find(dump, key.path) or {}]
    left_out = [path for path in parsed.told if path.startswith(f"{key.path}.")]
    for path in dict.fromkeys([*paths, *left_out]):
        source = parsed.told.get(path, "file")
        yield Fact(group, path, key.status, find(dump, path), source, True, key.what, key.reason)


def _value(parsed: Parsed, path: str) -> Any:
    value = find(parsed.config.model_dump(mode="json"), path, _MISSING)
    return find(dict(parsed.document), path) if value is _MISSING else value


def _is_section(path: str) -> bool:
    return path in ("optimizer", "scheduler")

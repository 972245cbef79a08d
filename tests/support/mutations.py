"""Mutated documents: whatever a file holds, its reader returns or raises rayzero's own error.

`mutate_tree` and `mutate_text` return a mutated copy; `read_mutations` mutates, reads and measures.

It reads `SAMPLE` documents, or as many as the environment variable RAYZERO_MUTATIONS says, in the
main thread, and other documents with another RAYZERO_MUTATIONS_SEED (an integer, added to `seed`).
It fails with the document's number and the document if a reader raises anything else, takes over
2 s of CPU time or waits for 30 s (it is interrupted), or makes the process grow by over 200 MB. To
read the same document again: `make(random.Random(f"{seed}:{number}"))`.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeVar

from rayzero.engine.errors import RayzeroError

T = TypeVar("T")

SAMPLE = 400
MAX_CPU_S = 2.0
MAX_WAIT_S = 30.0  # of a reader that waits, on a machine that is busy with other things
MAX_GROWTH_BYTES = 200 * 10**6

GARBAGE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, 1e400, -1e400, float("nan"), 10**30, 10**5000, -(2**70)),
    *(2**31, 2**40, 2**63, 10**9, 10**12, 1e300, 5e-324, -0.0),
    *("", "auto", "true", "nan", "Infinity", "8", "8.5", "9" * 5000, "ünïcödé", "\ud800", "\0"),
    *("../../x", "/dev/zero", "a" * 70_000, "\n", "\x1b[2J", "{}", "%s{0}", "://", "s3://"),
    *([], {}, [[]], [1, "a"], {"enabled": True}, {"enabled": {}}, {"": 1}, {"a": {"b": {"c": []}}}),
    *({"type": "AdamW"}, {"type": 3, "params": []}, {"device": "cpu"}, {"stage": "3"}),
]
DEPTHS = (2, 31, 32, 33, 99, 101, 300)
_TOKENS = [
    *(b"&a ", b"*a", b"<<: *a\n", b"!!timestamp x", b"!!float x", b"!!bool x", b"!!set {a}"),
    *(b"!!python/object:os.system ", b"!x ", b"---\n", b"...\n", b"? ", b"- ", b": ", b"|\n", b"'"),
    *(b"[", b"]", b"{", b"}", b"[" * 1500, b'{"a":' * 3000, b"- " * 1500, b"&a [*a]", b"\t", b'"'),
    *(b"2001-99-99", b"2001-01-01", b"1e999", b"-.inf", b".nan", b"Infinity", b"NaN", b"0x_"),
    *(b"9" * 5000, b"1:99:99", b"0b_", b"=", b"~", b"\\ud800", b'"\\ud800"', b"\xff\xfe", b"\0"),
    *(b"\xed\xa0\x80", "ß".encode(), b"%YAML 9.9\n", b"%TAG ! x\n", b"#", b",", b"\r", b"e" * 300),
]


def read_mutations(
    make: Callable[[random.Random], T],
    read: Callable[[T], object],
    *,
    seed: int,
    allowed: type[Exception] | tuple[type[Exception], ...] = RayzeroError,
    sample: int = SAMPLE,
) -> float:
    """Reads mutated documents; see the module. `allowed` are the errors that `read` may raise.
    Returns the share of documents that were rejected, so that a test can assert that the mutations
    reach the checks."""
    documents = int(os.environ.get("RAYZERO_MUTATIONS", sample))
    seed += int(os.environ.get("RAYZERO_MUTATIONS_SEED", 0))
    rejected = 0
    try:
        for number in range(documents):
            document = make(random.Random(f"{seed}:{number}"))
            before = _peak_bytes()
            with _time_limits():
                try:
                    read(document)
                except allowed as error:
                    rejected += 1
                    text = str(error)
                    text.encode()  # it is printed
                    assert 0 < len(text) < 20_000
            growth = _peak_bytes() - before
            assert growth < MAX_GROWTH_BYTES, f"the process grew by {growth} bytes"
    except BaseException as error:
        error.add_note(f"seed {seed}, document {number}: {_repr(document):.3000}")
        raise
    return rejected / documents


@contextmanager
def _time_limits() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"the reader took over {MAX_CPU_S} s, or waits")

    numbers = (signal.SIGPROF, signal.SIGALRM)
    previous = [signal.signal(number, stop) for number in numbers]
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    signal.setitimer(signal.ITIMER_REAL, MAX_WAIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


def _repr(document: object) -> str:
    try:
        return repr(document)
    except ValueError:  # an integer of thousands of digits
        return "(it cannot be printed)"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def mutate_tree(document: Any, rng: random.Random, names: tuple[str, ...] = ()) -> Any:
    """A copy with one to three changes; `names` are keys to add, besides those it has."""
    root = {"": deepcopy(document)}
    for _ in range(rng.randint(1, 3)):
        entries = list(_entries(root))[1:] or list(_entries(root))
        if not entries:  # the document itself was removed
            break
        parent, key = rng.choice(entries)
        _CHANGES[rng.randrange(len(_CHANGES))](parent, key, rng, entries, names)
    return root.get("", document)


def _entries(node: Any) -> Iterator[tuple[Any, Any]]:
    """(parent, key or index) of every value, from the top."""
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        yield node, key
        if isinstance(value, dict | list):
            yield from _entries(value)


def _replace(parent: Any, key: Any, rng: random.Random, *_: Any) -> None:
    parent[key] = deepcopy(rng.choice(GARBAGE))


def _perturb(parent: Any, key: Any, rng: random.Random, *_: Any) -> None:
    """Another value of the same type, or of a similar one."""
    value = parent[key]
    if isinstance(value, bool | None):
        parent[key] = rng.choice([True, False, None, 0, "true"])
    elif isinstance(value, int | float):
        changes = [-value, value + 1, value - 1, value * 10**12, [value]]
        changes += [value / 3, str(value)] if abs(value) < 1e300 else []
        parent[key] = rng.choice(changes)
    elif isinstance(value, str):
        parent[key] = rng.choice([value[:-1], value * 2, f"../{value}", value.upper(), [value]])
    elif isinstance(value, list):
        parent[key] = rng.choice([value[:-1], value * 2, value[::-1], {"0": value}, "[]"])
    else:
        parent[key] = rng.choice([list(value), list(value.values()), [value], "{}"])


def _remove(parent: Any, key: Any, *_: Any) -> None:
    del parent[key]


def _rename(parent: Any, key: Any, rng: random.Random, *_: Any) -> None:
    if not isinstance(key, str):
        parent.append(parent.pop(key)) if isinstance(parent, list) else parent.pop(key)
        return
    at = rng.randrange(len(key) + 1)
    spellings = [key[:at] + key[at + 1 :], f"{key[:at]}ß{key[at:]}", key.upper(), "", "\ud800", 3]
    parent[rng.choice(spellings)] = parent.pop(key)


def _add(parent: Any, key: Any, rng: random.Random, entries: Any, names: Any) -> None:
    value = deepcopy(rng.choice(GARBAGE))
    if isinstance(parent, list):
        parent.insert(key, value)
    else:
        keys = [name for _, name in entries if isinstance(name, str)]
        parent[rng.choice([*names, *keys, "x", "y"])] = value


def _copy_elsewhere(parent: Any, key: Any, rng: random.Random, entries: Any, _: Any) -> None:
    other, place = rng.choice(entries)
    value = deepcopy(parent[key])
    if isinstance(other, list):
        other.insert(place, value)
    else:
        other[rng.choice([place, key if isinstance(key, str) else place])] = value


def _nest(parent: Any, key: Any, rng: random.Random, *_: Any) -> None:
    value: Any = 1
    for _level in range(rng.choice(DEPTHS)):
        value = {"enabled": value} if rng.random() < 0.9 else [value]
    parent[key] = value


_CHANGES: tuple[Callable[..., None], ...] = (
    *(_replace, _replace, _perturb, _perturb, _remove, _rename, _add, _copy_elsewhere, _nest),
)


def to_json(document: Any) -> bytes:
    """As `json.dumps`, also of integers of thousands of digits."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(document).encode()
    finally:
        sys.set_int_max_str_digits(limit)


def mutate_text(content: bytes, rng: random.Random) -> bytes:
    """A copy with one to four changes."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(content) + 1)
        end = min(len(content), start + rng.choice([0, 1, 2, 8, 40, 200]))
        part = content[start:end]
        changes = [
            content[:start],
            content[start:],
            content[:start] + content[end:],
            content[:end] + part * rng.choice([1, 2, 50]) + content[end:],
            content[:start] + bytes(rng.randrange(256) for _ in part) + content[end:],
            content[:start] + part[::-1] + content[end:],
            *[content[:start] + rng.choice(_TOKENS) + content[end:]] * 6,
        ]
        content = rng.choice(changes)
    return content

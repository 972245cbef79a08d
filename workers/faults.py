"""The fault language: what is to break, when and where, one fault a line of text.

    kill(rank=1, step=7, phase="reduce")

A fault is a call with literal arguments. `step` counts from 1: the step being worked on, or that a
checkpoint was made of; the fault happens at the first chance from that step on. `rank` is the rank
in the generation in which that chance comes, `node` the place of a node in the order of ranks. A
fault happens `times` times in all, also when the step is done again in a later generation.
"""

from __future__ import annotations

import ast
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from rayzero.engine.errors import ConfigError, nearest

Where: TypeAlias = Literal["worker", "vault", "cluster", "store"]

PHASES = (
    *("data", "forward", "backward", "reduce", "update", "publish"),
    *("mirror", "gather", "join", "load"),
)
_LONGEST = 200


@dataclass(frozen=True)
class Kind:
    """One word of the language.

    Args:
        where: who makes it happen.
        does: what happens, for people.
        required: arguments without a default.
        defaults: those with one.
    """

    where: Where
    does: str
    required: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        return [*self.required, *self.defaults]


_AT = {"phase": "forward"}
_RANK, _NODE = ("rank", "step"), ("node", "step")
KINDS: Mapping[str, Kind] = {
    "kill": Kind("worker", "SIGKILL to a worker's process", _RANK, _AT),
    "stop": Kind("worker", "SIGSTOP to a worker's process: it does not even answer", _RANK, _AT),
    "slow": Kind(
        "worker", "a worker sleeps, once a step", (*_RANK, "seconds"), {"steps": 1, **_AT}
    ),
    "hang": Kind("worker", "training waits for ever; the process answers", _RANK, _AT),
    "raise_error": Kind("worker", "an exception as of user code", _RANK, {**_AT, "times": 1}),
    "kill_vault": Kind("vault", "SIGKILL to a node's vault", _NODE),
    "drop_node": Kind("cluster", "a node vanishes with all its Ray processes", _NODE),
    "partition": Kind(
        "cluster", "a node's network is down for so long (needs root)", (*_NODE, "seconds")
    ),
    "tear_file": Kind(
        "store", "a file of a finished checkpoint is damaged", ("step", "rank"), {"how": "flip"}
    ),
    "full_disk": Kind("store", "a vault's disk is full when it writes", ("step",), {"times": 1}),
    "slow_store": Kind(
        "store", "a vault's writing takes so much longer", ("seconds",), {"step": 1, "times": 1}
    ),
}

# What each argument may be: (type, least or choices).
_ALLOWED: Mapping[str, tuple[type, int | tuple[str, ...]]] = {
    "rank": (int, 0),
    "node": (int, 0),
    "step": (int, 1),
    "steps": (int, 1),
    "times": (int, 1),
    "seconds": (float, 0),
    "phase": (str, PHASES),
    "how": (str, ("flip", "cut", "remove")),
}


@dataclass(frozen=True)
class Fault:
    """One fault. An argument that its kind does not have keeps the value given here.

    `str` gives the canonical text, which parses to an equal fault.
    """

    kind: str
    step: int = 1
    rank: int = 0
    node: int = 0
    phase: str = ""
    seconds: float = 0.0
    steps: int = 1
    times: int = 1
    how: str = ""

    @property
    def where(self) -> Where:
        """Who makes it happen."""
        return KINDS[self.kind].where

    @property
    def firings(self) -> int:
        """How often it happens in all."""
        return self.times * self.steps

    def __str__(self) -> str:
        kind = KINDS[self.kind]
        given = [(name, getattr(self, name)) for name in kind.arguments]
        told = [
            f"{name}={_literal(value)}"
            for name, value in given
            if name in kind.required or value != kind.defaults[name]
        ]
        return f"{self.kind}({', '.join(told)})"


def parse(text: str, step: int | None = None) -> Fault:
    """The fault that a line of text names.

    Args:
        step: for a fault that names none; None: it has to.

    Raises:
        ConfigError: an unknown word or argument, a missing one, or a value out of range; it names
            the nearest valid word and what is allowed.
    """
    name, arguments = _call(text)
    kind = KINDS.get(name)
    if kind is None:
        raise _wrong(
            text, f"unknown fault {name!r}{nearest(name, [*KINDS])}", f"one of {', '.join(KINDS)}"
        )
    for key in arguments:
        if key not in kind.arguments:
            hint = nearest(key, kind.arguments)
            raise _wrong(text, f"{name} has no argument {key!r}{hint}", usage(name))
    if step is not None and "step" in kind.required:
        arguments.setdefault("step", step)
    for key in kind.required:
        if key not in arguments:
            raise _wrong(text, f"{name} needs {key}=", usage(name))
    values = {
        key: _checked(text, key, value) for key, value in {**kind.defaults, **arguments}.items()
    }
    return Fault(name, **values)


def example(name: str) -> Fault:
    """One good use of a word."""
    values = {"rank": 1, "node": 1, "step": 7, "seconds": 5.0, **KINDS[name].defaults}
    return Fault(name, **{key: values[key] for key in KINDS[name].arguments})


def random_schedule(
    seed: int, count: int, ranks: int, steps: int, kinds: Sequence[str] = ("kill", "stop", "hang")
) -> tuple[Fault, ...]:
    """`count` random faults in the order of their steps; the same for the same arguments.

    Args:
        ranks: workers of the job; `node` is drawn from as many.
        steps: steps are drawn from the second to this one, spread evenly, so that the job has
            finished one before the first fault and has time between two.
        kinds: words of the language to draw from.

    Raises:
        ConfigError: a kind is not in the language, or there are fewer than 2 steps.
    """
    for name in kinds:
        if name not in KINDS:
            raise ConfigError(
                f"unknown fault {name!r}{nearest(name, [*KINDS])}", f"one of {', '.join(KINDS)}"
            )
    if steps < 2 or ranks < 1:
        raise ConfigError(f"faults in {steps} steps of {ranks} ranks", "2 steps, 1 rank or more")
    draw = random.Random(seed)
    return tuple(
        _random(draw, draw.choice(kinds), step, ranks) for step in _spread(draw, count, steps)
    )


def _random(draw: random.Random, name: str, step: int, ranks: int) -> Fault:
    drawn: dict[str, Any] = {
        "step": step,
        "rank": draw.randrange(ranks),
        "node": draw.randrange(ranks),
        "phase": draw.choice(PHASES[:6]),  # those that every step has
        "seconds": round(draw.uniform(0.05, 0.5), 3),
        "steps": draw.randint(1, 3),
        "times": 1,
        "how": draw.choice(("flip", "cut", "remove")),
    }
    return Fault(name, **{key: drawn[key] for key in KINDS[name].arguments})


def _spread(draw: random.Random, count: int, steps: int) -> Iterator[int]:
    """One step out of each of `count` even parts of the steps from the second on."""
    for part in range(count):
        first, last = (2 + (steps - 1) * edge // count for edge in (part, part + 1))
        yield draw.randint(first, max(first, last - 1))


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the literal keyword arguments of the call that `text` is. Nothing is run."""
    shape = 'a call with named literals, such as kill(rank=1, step=7, phase="reduce")'
    if len(text) > _LONGEST:
        raise _wrong(text[:40] + "...", f"{len(text)} characters", f"at most {_LONGEST}")
    try:
        with warnings.catch_warnings(action="ignore"):  # odd escapes in a text that will be refused
            call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _wrong(text, "it cannot be read", shape) from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _wrong(text, "it is not a call", shape)
    if call.args:
        raise _wrong(text, "an argument without a name", shape)
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise _wrong(text, "an argument without a name", shape)
        if keyword.arg in arguments:
            raise _wrong(text, f"{keyword.arg!r} stands there twice", shape)
        try:
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise _wrong(text, f"{keyword.arg!r} is not a literal", shape) from None
    return call.func.id, arguments


def _checked(text: str, key: str, value: Any) -> Any:
    kind, limit = _ALLOWED[key]
    if isinstance(limit, tuple):
        if value in limit:
            return value
        hint = nearest(value, [*limit]) if isinstance(value, str) else ""
        raise _wrong(text, f"{key}={value!r}{hint}", f"one of {', '.join(limit)}")
    if kind is float:
        if type(value) in (int, float) and math.isfinite(value) and value > limit:
            return float(value)
        raise _wrong(text, f"{key}={value!r}", f"a number of seconds above {limit}")
    if type(value) is int and value >= limit:
        return value
    raise _wrong(text, f"{key}={value!r}", f"a whole number, {limit} or more")


def usage(name: str) -> str:
    """How a word is used: its arguments, and their defaults."""
    kind = KINDS[name]
    defaults = [f"{key}={_literal(value)}" for key, value in kind.defaults.items()]
    return f"{name}({', '.join([*(f'{key}=' for key in kind.required), *defaults])})"


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value).removesuffix(".0")


def _wrong(text: str, seen: str, allowed: str) -> ConfigError:
    fix = "`faults` in the job file; `rayzero chaos --list` tells the words"
    return ConfigError(f"fault {text!r}: {seen}", allowed, fix)

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

from rayzero.engine.errors import ConfigError, did_you_mean

FaultTarget: TypeAlias = Literal["worker", "vault", "cluster", "store"]

PHASES = (
    *("data", "forward", "backward", "reduce", "update", "publish"),
    *("mirror", "gather", "join", "load"),
)


_MAX_TEXT_CHARACTERS = 200


@dataclass(frozen=True)
class FaultKind:
    """One word of the language.

    Args:
        where: who makes it happen.
        does: what happens, for people.
        required: arguments without a default.
        defaults: those with one.
    """

    target: FaultTarget
    description: str
    required: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        return [*self.required, *self.defaults]


_DEFAULT_PHASE = {"phase": "forward"}


_RANK_ARGUMENTS, _NODE_ARGUMENTS = ("rank", "step"), ("node", "step")


FAULT_KINDS: Mapping[str, FaultKind] = {
    "kill": FaultKind("worker", "SIGKILL to a worker's process", _RANK_ARGUMENTS, _DEFAULT_PHASE),
    "stop": FaultKind(
        "worker",
        "SIGSTOP to a worker's process: it does not even answer",
        _RANK_ARGUMENTS,
        _DEFAULT_PHASE,
    ),
    "slow": FaultKind(
        "worker",
        "a worker sleeps, once a step",
        (*_RANK_ARGUMENTS, "seconds"),
        {"steps": 1, **_DEFAULT_PHASE},
    ),
    "hang": FaultKind(
        "worker", "training waits for ever; the process answers", _RANK_ARGUMENTS, _DEFAULT_PHASE
    ),
    "raise_error": FaultKind(
        "worker", "an exception as of user code", _RANK_ARGUMENTS, {**_DEFAULT_PHASE, "times": 1}
    ),
    "kill_vault": FaultKind("vault", "SIGKILL to a node's vault", _NODE_ARGUMENTS),
    "drop_node": FaultKind(
        "cluster", "a node vanishes with all its Ray processes", _NODE_ARGUMENTS
    ),
    "partition": FaultKind(
        "cluster",
        "a node's network is down for so long (needs root)",
        (*_NODE_ARGUMENTS, "seconds"),
    ),
    "tear_file": FaultKind(
        "store", "a file of a finished checkpoint is damaged", ("step", "rank"), {"how": "flip"}
    ),
    "full_disk": FaultKind(
        "store", "a vault's disk is full when it writes", ("step",), {"times": 1}
    ),
    "slow_store": FaultKind(
        "store", "a vault's writing takes so much longer", ("seconds",), {"step": 1, "times": 1}
    ),
}

# What each argument may be: (type, least or choices).
_ALLOWED_VALUES: Mapping[str, tuple[type, int | tuple[str, ...]]] = {
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
class FaultSpec:
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
    def target(self) -> FaultTarget:
        """Who makes it happen."""
        return FAULT_KINDS[self.kind].target

    @property
    def total_firings(self) -> int:
        """How often it happens in all."""
        return self.times * self.steps

    def __str__(self) -> str:
        kind = FAULT_KINDS[self.kind]
        given = [(name, getattr(self, name)) for name in kind.arguments]
        told = [
            f"{name}={_format_literal(value)}"
            for name, value in given
            if name in kind.required or value != kind.defaults[name]
        ]
        return f"{self.kind}({', '.join(told)})"


def parse_fault(text: str, step: int | None = None) -> FaultSpec:
    """The fault that a line of text names.

    Args:
        step: for a fault that names none; None: it has to.

    Raises:
        ConfigError: an unknown word or argument, a missing one, or a value out of range; it names
            the nearest valid word and what is allowed.
    """
    name, arguments = _parse_call(text)
    kind = FAULT_KINDS.get(name)
    if kind is None:
        raise _fault_error(
            text,
            f"unknown fault {name!r}{did_you_mean(name, [*FAULT_KINDS])}",
            f"one of {', '.join(FAULT_KINDS)}",
        )
    for key in arguments:
        if key not in kind.arguments:
            hint = did_you_mean(key, kind.arguments)
            raise _fault_error(text, f"{name} has no argument {key!r}{hint}", fault_usage(name))
    if step is not None and "step" in kind.required:
        arguments.setdefault("step", step)
    for key in kind.required:
        if key not in arguments:
            raise _fault_error(text, f"{name} needs {key}=", fault_usage(name))
    values = {
        key: _check_value(text, key, value) for key, value in {**kind.defaults, **arguments}.items()
    }
    return FaultSpec(name, **values)


def example_fault(name: str) -> FaultSpec:
    """One good use of a word."""
    values = {"rank": 1, "node": 1, "step": 7, "seconds": 5.0, **FAULT_KINDS[name].defaults}
    return FaultSpec(name, **{key: values[key] for key in FAULT_KINDS[name].arguments})


def random_faults(
    seed: int, count: int, ranks: int, steps: int, kinds: Sequence[str] = ("kill", "stop", "hang")
) -> tuple[FaultSpec, ...]:
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
        if name not in FAULT_KINDS:
            raise ConfigError(
                f"unknown fault {name!r}{did_you_mean(name, [*FAULT_KINDS])}",
                f"one of {', '.join(FAULT_KINDS)}",
            )
    if steps < 2 or ranks < 1:
        raise ConfigError(f"faults in {steps} steps of {ranks} ranks", "2 steps, 1 rank or more")
    draw = random.Random(seed)
    return tuple(
        _random_fault(draw, draw.choice(kinds), step, ranks)
        for step in _spread_steps(draw, count, steps)
    )


def _random_fault(draw: random.Random, name: str, step: int, ranks: int) -> FaultSpec:
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
    return FaultSpec(name, **{key: drawn[key] for key in FAULT_KINDS[name].arguments})


def _spread_steps(draw: random.Random, count: int, steps: int) -> Iterator[int]:
    """One step out of each of `count` even parts of the steps from the second on."""
    for part in range(count):
        first, last = (2 + (steps - 1) * edge // count for edge in (part, part + 1))
        yield draw.randint(first, max(first, last - 1))


def _parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the literal keyword arguments of the call that `text` is. Nothing is run."""
    shape = 'a call with named literals, such as kill(rank=1, step=7, phase="reduce")'
    if len(text) > _MAX_TEXT_CHARACTERS:
        raise _fault_error(
            text[:40] + "...", f"{len(text)} characters", f"at most {_MAX_TEXT_CHARACTERS}"
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # odd escapes in a text that will be refused
            call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _fault_error(text, "it cannot be read", shape) from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _fault_error(text, "it is not a call", shape)
    if call.args:
        raise _fault_error(text, "an argument without a name", shape)
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise _fault_error(text, "an argument without a name", shape)
        if keyword.arg in arguments:
            raise _fault_error(text, f"{keyword.arg!r} stands there twice", shape)
        try:
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise _fault_error(text, f"{keyword.arg!r} is not a literal", shape) from None
    return call.func.id, arguments


def _check_value(text: str, key: str, value: Any) -> Any:
    kind, limit = _ALLOWED_VALUES[key]
    if isinstance(limit, tuple):
        if value in limit:
            return value
        hint = did_you_mean(value, [*limit]) if isinstance(value, str) else ""
        raise _fault_error(text, f"{key}={value!r}{hint}", f"one of {', '.join(limit)}")
    if kind is float:
        if type(value) in (int, float) and math.isfinite(value) and value > limit:
            return float(value)
        raise _fault_error(text, f"{key}={value!r}", f"a number of seconds above {limit}")
    if type(value) is int and value >= limit:
        return value
    raise _fault_error(text, f"{key}={value!r}", f"a whole number, {limit} or more")


def fault_usage(name: str) -> str:
    """How a word is used: its arguments, and their defaults."""
    kind = FAULT_KINDS[name]
    defaults = [f"{key}={_format_literal(value)}" for key, value in kind.defaults.items()]
    return f"{name}({', '.join([*(f'{key}=' for key in kind.required), *defaults])})"


def _format_literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value).removesuffix(".0")


def _fault_error(text: str, seen: str, allowed: str) -> ConfigError:
    fix = "`faults` in the job file; `rayzero chaos --list` tells the words"
    return ConfigError(f"fault {text!r}: {seen}", allowed, fix)


@dataclass(frozen=True)
class FaultFired:
    """An injected fault happened just now; sent before it takes effect."""

    rank: int
    step: int
    fault: str

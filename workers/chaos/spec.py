"""The fault language: each fault is one line of text that says what fails, when and where.

    kill(rank=1, step=7, phase="reduce")

A fault is a call with literal arguments. `step` is the current step, or the step of a checkpoint,
counted from 1; the fault is injected at the first opportunity from that step on. `rank` is a rank
in the generation of that time, `node` the index of a node in rank order. A fault is injected
`times` times in all, even if a later generation repeats the step.
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

_STEP_PHASES = ("data", "forward", "backward", "reduce", "update", "publish")
PHASES = (*_STEP_PHASES, "mirror", "gather", "join", "load")

_MAX_TEXT_CHARACTERS = 200
_SYNTAX = 'a call with keyword literals, such as kill(rank=1, step=7, phase="reduce")'


@dataclass(frozen=True)
class FaultKind:
    """One function of the language.

    Args:
        target: the component that injects the fault.
        required: arguments without a default.
        defaults: arguments with a default.
    """

    target: FaultTarget
    description: str
    required: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        return [*self.required, *self.defaults]


_ON_RANK, _ON_NODE, _PHASE = ("rank", "step"), ("node", "step"), {"phase": "forward"}

FAULT_KINDS: Mapping[str, FaultKind] = {
    "kill": FaultKind("worker", "SIGKILL to a worker's process", _ON_RANK, _PHASE),
    "stop": FaultKind(
        "worker", "SIGSTOP to a worker's process, which then does not respond", _ON_RANK, _PHASE
    ),
    "slow": FaultKind(
        "worker", "a worker sleeps once a step", (*_ON_RANK, "seconds"), {"steps": 1, **_PHASE}
    ),
    "hang": FaultKind(
        "worker", "training blocks for ever; the process still responds", _ON_RANK, _PHASE
    ),
    "raise_error": FaultKind(
        "worker", "an exception, as if from user code", _ON_RANK, {**_PHASE, "times": 1}
    ),
    "kill_vault": FaultKind("vault", "SIGKILL to a node's vault", _ON_NODE),
    "drop_node": FaultKind("cluster", "SIGKILL to all Ray processes of a node", _ON_NODE),
    "partition": FaultKind(
        "cluster",
        "a node's network is down for `seconds` (needs root)",
        (*_ON_NODE, "seconds"),
    ),
    "tear_file": FaultKind(
        "store", "a file of a finished checkpoint is damaged", ("step", "rank"), {"how": "flip"}
    ),
    "full_disk": FaultKind(
        "store", "a vault's write fails with a full disk", ("step",), {"times": 1}
    ),
    "slow_store": FaultKind(
        "store", "a vault's write takes `seconds` longer", ("seconds",), {"step": 1, "times": 1}
    ),
}

_ALLOWED_VALUES: Mapping[str, tuple[type, int | tuple[str, ...]]] = {  # type; minimum or choices
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
    """One fault. Arguments that its kind does not have keep the defaults below.

    `str` returns the canonical text, which parses to an equal fault.
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
        return FAULT_KINDS[self.kind].target

    @property
    def total_firings(self) -> int:
        """How often the fault is injected in all."""
        return self.times * self.steps

    def __str__(self) -> str:
        kind = FAULT_KINDS[self.kind]
        values = {name: getattr(self, name) for name in kind.arguments}
        arguments = [
            f"{name}={_format_literal(value)}"
            for name, value in values.items()
            if name in kind.required or value != kind.defaults[name]
        ]
        return f"{self.kind}({', '.join(arguments)})"


@dataclass(frozen=True)
class FaultFired:
    """An injected fault; sent before it takes effect."""

    rank: int
    step: int
    fault: str


def parse_fault(text: str, step: int | None = None) -> FaultSpec:
    """Parses one line of the fault language.

    Args:
        step: for a fault without one; None: the text must have it.

    Raises:
        ConfigError: an unknown name or argument, a missing one, or a value out of range; the error
            suggests the nearest valid name and lists what is allowed.
    """
    name, arguments = _parse_call(text)
    if name not in FAULT_KINDS:
        raise _fault_error(text, *_unknown_kind(name))
    kind = FAULT_KINDS[name]
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


def fault_usage(name: str) -> str:
    """The signature of a kind, with defaults."""
    kind = FAULT_KINDS[name]
    defaults = [f"{key}={_format_literal(value)}" for key, value in kind.defaults.items()]
    return f"{name}({', '.join([*(f'{key}=' for key in kind.required), *defaults])})"


def example_fault(name: str) -> FaultSpec:
    """A typical fault of that kind."""
    values = {"rank": 1, "node": 1, "step": 7, "seconds": 5.0, **FAULT_KINDS[name].defaults}
    return FaultSpec(name, **{key: values[key] for key in FAULT_KINDS[name].arguments})


def random_faults(
    seed: int, count: int, ranks: int, steps: int, kinds: Sequence[str] = ("kill", "stop", "hang")
) -> tuple[FaultSpec, ...]:
    """Draws `count` random faults, ordered by step. Deterministic in its arguments.

    Args:
        ranks: workers of the job, and the number of nodes to draw `node` from.
        steps: the last step. Faults are spread evenly from step 2 on, so that the job finishes a
            step before the first fault and between two.

    Raises:
        ConfigError: an unknown kind, or fewer than 2 steps.
    """
    for name in kinds:
        if name not in FAULT_KINDS:
            raise ConfigError(*_unknown_kind(name))
    if steps < 2 or ranks < 1:
        raise ConfigError(f"faults in {steps} steps of {ranks} ranks", "2 steps, 1 rank or more")
    draw = random.Random(seed)
    return tuple(
        _random_fault(draw, draw.choice(kinds), step, ranks)
        for step in _spread_steps(draw, count, steps)
    )


def _random_fault(draw: random.Random, name: str, step: int, ranks: int) -> FaultSpec:
    values: dict[str, Any] = {
        "step": step,
        "rank": draw.randrange(ranks),
        "node": draw.randrange(ranks),
        "phase": draw.choice(_STEP_PHASES),
        "seconds": round(draw.uniform(0.05, 0.5), 3),
        "steps": draw.randint(1, 3),
        "times": 1,
        "how": draw.choice(("flip", "cut", "remove")),
    }
    return FaultSpec(name, **{key: values[key] for key in FAULT_KINDS[name].arguments})


def _spread_steps(draw: random.Random, count: int, steps: int) -> Iterator[int]:
    """One step from each of `count` even ranges of the steps from 2 on."""
    for part in range(count):
        first, end = (2 + (steps - 1) * edge // count for edge in (part, part + 1))
        yield draw.randint(first, max(first, end - 1))


def _parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the literal keyword arguments of a call. Evaluates nothing."""
    if len(text) > _MAX_TEXT_CHARACTERS:
        raise _fault_error(
            text[:40] + "...", f"{len(text)} characters", f"at most {_MAX_TEXT_CHARACTERS}"
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes, in an invalid text
            call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _fault_error(text, "not valid syntax", _SYNTAX) from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _fault_error(text, "not a call", _SYNTAX)
    if call.args:
        raise _fault_error(text, "an argument without a name", _SYNTAX)
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise _fault_error(text, "an argument without a name", _SYNTAX)
        if keyword.arg in arguments:
            raise _fault_error(text, f"argument {keyword.arg!r} given twice", _SYNTAX)
        try:
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise _fault_error(text, f"{keyword.arg!r} is not a literal", _SYNTAX) from None
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


def _format_literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value).removesuffix(".0")


def _unknown_kind(name: str) -> tuple[str, str]:
    """(seen, allowed) of the error."""
    seen = f"unknown fault {name!r}{did_you_mean(name, [*FAULT_KINDS])}"
    return seen, f"one of {', '.join(FAULT_KINDS)}"


def _fault_error(text: str, seen: str, allowed: str) -> ConfigError:
    fix = "`faults` in the job file; `rayzero chaos --list` prints the language"
    return ConfigError(f"fault {text!r}: {seen}", allowed, fix)

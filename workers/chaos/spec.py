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
_DAMAGES = ("flip", "cut", "remove")

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


_ON_RANK = ("rank", "step")
_ON_NODE = ("node", "step")
_PHASE = {"phase": "forward"}

FAULT_KINDS: Mapping[str, FaultKind] = {
    "kill": FaultKind("worker", "SIGKILL to a worker's process", _ON_RANK, _PHASE),
    "stop": FaultKind(
        "worker", "SIGSTOP to a worker's process, which then does not respond", _ON_RANK, _PHASE
    ),
    "slow": FaultKind(
        "worker", "a worker sleeps once a step", (*_ON_RANK, "seconds"), {"steps": 1, **_PHASE}
    ),
    "hang": FaultKind(
        "worker", "training blocks forever; the process still responds", _ON_RANK, _PHASE
    ),
    "raise_error": FaultKind(
        "worker", "an exception, as if from user code", _ON_RANK, {**_PHASE, "times": 1}
    ),
    "kill_vault": FaultKind("vault", "SIGKILL to a node's vault", _ON_NODE),
    "drop_node": FaultKind("cluster", "SIGKILL to all Ray processes of a node", _ON_NODE),
    "partition": FaultKind(
        "cluster", "a node's network is down for `seconds` (needs root)", (*_ON_NODE, "seconds")
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

_CHOICES = {"phase": PHASES, "how": _DAMAGES}
_MINIMUM = {"rank": 0, "node": 0, "step": 1, "steps": 1, "times": 1}


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
    try:
        return _parse_fault(text, {} if step is None else {"step": step})
    except ConfigError as error:
        shown = text if len(text) <= _MAX_TEXT_CHARACTERS else text[:40] + "..."
        fix = "`faults` in the job file; `rayzero chaos --list` prints the language"
        raise ConfigError(f"fault {shown!r}: {error.seen}", error.allowed, fix) from None


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
        _fault_kind(name)
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
        "how": draw.choice(_DAMAGES),
    }
    return FaultSpec(name, **{key: values[key] for key in FAULT_KINDS[name].arguments})


def _spread_steps(draw: random.Random, count: int, steps: int) -> Iterator[int]:
    """One step from each of `count` even ranges of the steps from 2 on."""
    for part in range(count):
        first, end = (2 + (steps - 1) * edge // count for edge in (part, part + 1))
        yield draw.randint(first, max(first, end - 1))


def _parse_fault(text: str, defaults: Mapping[str, Any]) -> FaultSpec:
    """`defaults`: for required arguments."""
    name, arguments = _parse_call(text)
    kind = _fault_kind(name)
    for key in arguments:
        if key not in kind.arguments:
            hint = did_you_mean(key, kind.arguments)
            raise ConfigError(f"{name} has no argument {key!r}{hint}", fault_usage(name))
    values = {**defaults, **kind.defaults, **arguments}
    for key in kind.required:
        if key not in values:
            raise ConfigError(f"{name} needs {key}=", fault_usage(name))
    return FaultSpec(name, **{key: _check_value(key, values[key]) for key in kind.arguments})


def _fault_kind(name: str) -> FaultKind:
    if name not in FAULT_KINDS:
        hint = did_you_mean(name, [*FAULT_KINDS])
        raise ConfigError(f"unknown fault {name!r}{hint}", f"one of {', '.join(FAULT_KINDS)}")
    return FAULT_KINDS[name]


def _parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the literal keyword arguments of a call. Evaluates nothing."""
    if len(text) > _MAX_TEXT_CHARACTERS:
        raise ConfigError(f"{len(text)} characters", f"at most {_MAX_TEXT_CHARACTERS}")
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes, in an invalid text
            call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError("not valid syntax", _SYNTAX) from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ConfigError("not a call", _SYNTAX)
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ConfigError("an argument without a name", _SYNTAX)
    arguments: dict[str, Any] = {}
    for key, value in ((str(keyword.arg), keyword.value) for keyword in call.keywords):
        if key in arguments:
            raise ConfigError(f"argument {key!r} given twice", _SYNTAX)
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise ConfigError(f"{key!r} is not a literal", _SYNTAX) from None
    return call.func.id, arguments


def _check_value(key: str, value: Any) -> Any:
    if choices := _CHOICES.get(key):
        if value in choices:
            return value
        hint = did_you_mean(value, [*choices]) if isinstance(value, str) else ""
        raise ConfigError(f"{key}={value!r}{hint}", f"one of {', '.join(choices)}")
    if key == "seconds":
        if type(value) in (int, float) and math.isfinite(value) and value > 0:
            return float(value)
        raise ConfigError(f"{key}={value!r}", "a number of seconds above 0")
    if type(value) is int and value >= _MINIMUM[key]:
        return value
    raise ConfigError(f"{key}={value!r}", f"a whole number, {_MINIMUM[key]} or more")


def _format_literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value).removesuffix(".0")

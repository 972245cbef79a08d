"""The fault language: each fault is one line of text that says what fails, when and where.

    kill(rank=1, step=7, phase="reduce")

A fault is a call with literal arguments. `step` is the current step, or the step of a checkpoint,
counted from 1; the fault is injected at the first opportunity from that step on. `rank` is a rank
in the current generation, `node` is the index of a node in rank order, and `worker` is a worker's
number in `role`. A fault is injected `times` times, even if a later generation repeats the step.
"""

from __future__ import annotations

import ast
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from rayzero.engine.errors import ConfigError, did_you_mean

FaultTarget: TypeAlias = Literal["worker", "role", "vault", "cluster", "store"]

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

    @property
    def of_role(self) -> bool:
        """Whether the fault hits a role's worker."""
        return self.target == "role"


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
    "slow_node": FaultKind(
        "vault", "a node is ten times slower, as its health checks measure it", _ON_NODE
    ),
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

ROLE_FAULT_KINDS: Mapping[str, FaultKind] = {
    name: FaultKind("role", FAULT_KINDS[name].description, ("role", "worker", "step"))
    for name in ("kill", "stop")
}
"""The kinds that hit a role's worker if `role` is given."""


def all_fault_kinds() -> list[tuple[str, FaultKind]]:
    """Returns the names and kinds of all faults; the kinds for roles are the last."""
    return [*FAULT_KINDS.items(), *ROLE_FAULT_KINDS.items()]


_CHOICES = {"phase": PHASES, "how": _DAMAGES}
_MINIMUM = {"rank": 0, "worker": 0, "node": 0, "step": 1, "steps": 1, "times": 1}


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
    role: str = ""
    worker: int = 0

    @property
    def target(self) -> FaultTarget:
        return self._kind.target

    @property
    def _kind(self) -> FaultKind:
        return _fault_kind(self.kind, of_role=bool(self.role))

    @property
    def total_firings(self) -> int:
        """How often the fault is injected in all."""
        return self.times * self.steps

    def __str__(self) -> str:
        kind = self._kind
        values = {name: getattr(self, name) for name in kind.arguments}
        arguments = [
            f"{name}={_format_literal(value)}"
            for name, value in values.items()
            if name in kind.required or value != kind.defaults[name]
        ]
        return f"{self.kind}({', '.join(arguments)})"


@dataclass(frozen=True)
class FaultFired:
    """An injected fault, sent before it takes effect. With a `role`, `rank` is the worker's number
    in that role."""

    rank: int
    step: int
    fault: str
    role: str = ""

    @property
    def where(self) -> str:
        """`rank 0`, or `rollout 0` for a role's worker."""
        return f"{self.role or 'rank'} {self.rank}"


def parse_fault(text: str, step: int | None = None) -> FaultSpec:
    """Parses one line of the fault language.

    Args:
        step: the step of a fault without one; None: the text must have a step.

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


def fault_usage(name: str, *, of_role: bool = False) -> str:
    """Returns the signature of a kind, with defaults."""
    kind = _fault_kind(name, of_role=of_role)
    defaults = [f"{key}={_format_literal(value)}" for key, value in kind.defaults.items()]
    return f"{name}({', '.join([*(f'{key}=' for key in kind.required), *defaults])})"


def example_fault(name: str, *, of_role: bool = False) -> FaultSpec:
    """Returns a typical fault of that kind."""
    kind = _fault_kind(name, of_role=of_role)
    values: dict[str, Any] = {"rank": 1, "node": 1, "step": 7, "seconds": 5.0}
    values |= {"role": "rollout", "worker": 1, **kind.defaults}
    return FaultSpec(name, **{key: values[key] for key in kind.arguments})


def why_no_such_worker(fault: FaultSpec, roles: Mapping[str, int]) -> str:
    """Returns why the role's worker that a fault names cannot exist; empty if it can, or if the
    fault names none.

    Args:
        roles: the most workers of each of the job's roles.
    """
    if not fault.role:
        return ""
    if fault.role not in roles:
        hint = did_you_mean(fault.role, [*roles])
        return f"the job has no role {fault.role!r}{hint}; its roles: {', '.join(roles) or 'none'}"
    most = roles[fault.role]
    return f"role {fault.role} has at most {most} workers" if fault.worker >= most else ""


def random_faults(
    seed: int,
    count: int,
    ranks: int,
    steps: int,
    kinds: Sequence[str] = ("kill", "stop", "hang"),
    roles: Mapping[str, int] | None = None,
) -> tuple[FaultSpec, ...]:
    """Draws `count` random faults, ordered by step. Deterministic in its arguments.

    Args:
        ranks: workers of the job, and the number of nodes to draw `node` from.
        steps: the last step. Faults are spread evenly from step 2 on, so that the job finishes a
            step before the first fault and between two faults.
        roles: workers of each role. Faults of kinds that can hit them hit each worker of the job,
            rank or not, with the same probability.

    Raises:
        ConfigError: an unknown kind, or fewer than 2 steps.
    """
    for name in kinds:
        _fault_kind(name)
    others = [(role, worker) for role, most in (roles or {}).items() for worker in range(most)]
    if steps < 2 or ranks < 1:
        raise ConfigError(f"faults in {steps} steps of {ranks} ranks", "2 steps, 1 rank or more")
    draw = random.Random(seed)
    return tuple(
        _random_fault(draw, draw.choice(kinds), step, ranks, others)
        for step in _spread_steps(draw, count, steps)
    )


def _random_fault(
    draw: random.Random, name: str, step: int, ranks: int, others: Sequence[tuple[str, int]]
) -> FaultSpec:
    if others and name in ROLE_FAULT_KINDS and draw.randrange(ranks + len(others)) >= ranks:
        role, worker = draw.choice(others)
        return FaultSpec(name, step, role=role, worker=worker)
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
    """Yields a random step from each of `count` equal ranges of the steps from 2 on."""
    for part in range(count):
        first = 2 + (steps - 1) * part // count
        end = 2 + (steps - 1) * (part + 1) // count
        yield draw.randint(first, max(first, end - 1))


def _parse_fault(text: str, defaults: Mapping[str, Any]) -> FaultSpec:
    """Parses a fault. `defaults` has values for required arguments that the text lacks."""
    name, arguments = _parse_call(text)
    of_role = "role" in arguments and name in ROLE_FAULT_KINDS
    kind = _fault_kind(name, of_role=of_role)
    usage = partial(fault_usage, name, of_role=of_role)
    for key in arguments:
        if key not in kind.arguments:
            hint = did_you_mean(key, kind.arguments)
            raise ConfigError(f"{name} has no argument {key!r}{hint}", usage())
    values = {**defaults, **kind.defaults, **arguments}
    for key in kind.required:
        if key not in values:
            raise ConfigError(f"{name} needs {key}=", usage())
    return FaultSpec(name, **{key: _check_value(key, values[key]) for key in kind.arguments})


def _fault_kind(name: str, *, of_role: bool = False) -> FaultKind:
    if name not in FAULT_KINDS:
        hint = did_you_mean(name, [*FAULT_KINDS])
        raise ConfigError(f"unknown fault {name!r}{hint}", f"one of {', '.join(FAULT_KINDS)}")
    return (ROLE_FAULT_KINDS if of_role else FAULT_KINDS)[name]


def _parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the literal keyword arguments of a call. Evaluates nothing."""
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
    for keyword in call.keywords:
        key = str(keyword.arg)
        if key in arguments:
            raise ConfigError(f"argument {key!r} given twice", _SYNTAX)
        try:
            arguments[key] = ast.literal_eval(keyword.value)
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
    if key == "role":
        if isinstance(value, str) and value:
            return value
        raise ConfigError(f"role={value!r}", 'the name of a role, such as role="rollout"')
    if type(value) is int and value >= _MINIMUM[key]:
        return value
    raise ConfigError(f"{key}={value!r}", f"a whole number, {_MINIMUM[key]} or more")


def _format_literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value).removesuffix(".0")

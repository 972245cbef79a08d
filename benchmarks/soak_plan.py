"""Plans of the soak test's episodes: the settings and faults of each, drawn from its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks import soak_job
from benchmarks.disruptions import DISRUPTIONS
from benchmarks.soak_control import format_disruption, parse_disruption
from benchmarks.soak_rollouts import ROLES
from rayzero.workers.chaos.spec import (
    FAULT_KINDS,
    ROLE_FAULT_KINDS,
    FaultKind,
    FaultSpec,
    parse_fault,
    random_faults,
)

STEPS_PER_FAULT = 20
WORLD_SIZE = 3
OF_ROLE = "_role"
"""Suffix of the kinds that hit a role's worker."""
AT_EDGE = 0.5
"""How often the first fault of an episode precedes its first step, and the last one its last step,
if they can."""


@dataclass(frozen=True)
class Plan:
    """An episode, fully determined by its seed and its number and kinds of faults."""

    number: int
    seed: int
    stage: int
    steps: int
    faults: tuple[str, ...]
    rollouts: bool = False
    """Whether the job trains on rollouts."""
    stream: bool = False
    """Whether its data is a mixture of streams of files."""


def plan(
    seed: int,
    number: int,
    count: int,
    kinds: Sequence[str],
    nodes: int,
    rollouts: bool = False,
    stream: bool = False,
) -> Plan:
    """Plan the episode with the given number for the given soak seed."""
    rng = random.Random(f"{seed}-{number}")
    episode_seed, stage = rng.randrange(2**31), rng.randrange(4)
    steps = STEPS_PER_FAULT * count + soak_job.TAIL
    names: list[str] = []
    for _ in range(count):
        names.append(rng.choice([name for name in kinds if not _is_used_up(name, names)] or kinds))
    faults = []
    for part, name in enumerate(names):
        step = rng.randint(max(2, STEPS_PER_FAULT * part), STEPS_PER_FAULT * (part + 1) - 1)
        if (disruption := DISRUPTIONS.get(name)) is None:
            faults.append(_draw_fault(rng, name, step, nodes))
            continue
        if disruption.at_start and part == 0 and rng.random() < AT_EDGE:
            step = 0
        elif disruption.at_end and part == count - 1 and rng.random() < AT_EDGE:
            step = steps - 1
        faults.append(format_disruption(name, step))
    return Plan(number, episode_seed, stage, steps, tuple(faults), rollouts, stream)


def _is_used_up(name: str, drawn: list[str]) -> bool:
    return name in DISRUPTIONS and 0 < DISRUPTIONS[name].per_episode <= drawn.count(name)


def _draw_fault(rng: random.Random, name: str, step: int, nodes: int) -> str:
    if name.endswith(OF_ROLE):
        role = rng.choice([*ROLES])
        kind, worker = name.removesuffix(OF_ROLE), rng.randrange(ROLES[role])
        return str(FaultSpec(kind, step, role=role, worker=worker))
    (fault,) = random_faults(rng.randrange(2**31), 1, WORLD_SIZE, 2, [name])
    return str(replace(fault, step=step, node=fault.node % nodes))


def kind_of(text: str) -> str:
    if parsed := parse_disruption(text):
        return parsed[0]
    fault = parse_fault(text)
    return fault.kind + OF_ROLE * bool(fault.role)


def fault_kind(name: str) -> FaultKind:
    """The kind of the fault language with that name in a plan."""
    if name.endswith(OF_ROLE):
        return ROLE_FAULT_KINDS[name.removesuffix(OF_ROLE)]
    return FAULT_KINDS[name]

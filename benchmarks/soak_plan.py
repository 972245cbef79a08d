"""Plans of the soak test's episodes: the settings and faults of each, drawn from its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import soak_job, soak_streams
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
STREAM_STEPS_PER_FAULT = 10
STREAM_WORKERS = (2, 2, 3, 3, 5)
"""Of a job on a stream, on one node."""
HAS_BAD = 0.5
"""How often a job on a stream has bad samples."""
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
    workers: int = WORLD_SIZE
    stream: str = ""
    """The kind of stream that is its data, of `soak_streams.KINDS`; empty: a dataset."""
    loader_processes: int = 0
    """Of each rank; 0: its thread makes the samples."""
    micro_batch: int = soak_job.SAMPLES
    has_bad: bool = False
    """Whether the transform of the stream fails for some rows, which are left out."""


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
    settings = _draw_stream(seed, number, nodes) if stream else {}
    workers = settings.get("workers", WORLD_SIZE)
    episode_seed, stage = rng.randrange(2**31), rng.randrange(4)
    each = STREAM_STEPS_PER_FAULT if stream else STEPS_PER_FAULT
    steps = each * count + soak_job.TAIL
    names: list[str] = []
    for _ in range(count):
        names.append(rng.choice([name for name in kinds if not _is_used_up(name, names)] or kinds))
    faults = []
    for part, name in enumerate(names):
        step = rng.randint(max(2, each * part), each * (part + 1) - 1)
        if (disruption := DISRUPTIONS.get(name)) is None:
            faults.append(_draw_fault(rng, name, step, nodes, workers))
            continue
        if disruption.at_start and part == 0 and rng.random() < AT_EDGE:
            step = 0
        elif disruption.at_end and part == count - 1 and rng.random() < AT_EDGE:
            step = steps - 1
        faults.append(format_disruption(name, step))
    return Plan(number, episode_seed, stage, steps, tuple(faults), rollouts, **settings)


def _draw_stream(seed: int, number: int, nodes: int) -> dict[str, Any]:
    """The settings of a plan with a stream. The other ones do not depend on them."""
    rng = random.Random(f"{seed}-{number}-stream")
    kind = soak_streams.KINDS[(seed + number) % len(soak_streams.KINDS)]
    return {
        "stream": kind,
        "workers": rng.choice(STREAM_WORKERS) if nodes == 1 else WORLD_SIZE,
        "loader_processes": rng.choice((0, 2)),
        "has_bad": rng.random() < HAS_BAD and kind != "iterable",  # whose rows are never left out
        "micro_batch": rng.choice((1, 3, soak_job.SAMPLES)),
    }


def _is_used_up(name: str, drawn: list[str]) -> bool:
    if (disruption := DISRUPTIONS.get(name)) is None:
        return False
    has_left = any(it in DISRUPTIONS and DISRUPTIONS[it].leaves_cluster for it in drawn)
    return 0 < disruption.per_episode <= drawn.count(name) or (disruption.needs_head and has_left)


def _draw_fault(rng: random.Random, name: str, step: int, nodes: int, workers: int) -> str:
    if name.endswith(OF_ROLE):
        role = rng.choice([*ROLES])
        kind, worker = name.removesuffix(OF_ROLE), rng.randrange(ROLES[role])
        return str(FaultSpec(kind, step, role=role, worker=worker))
    (fault,) = random_faults(rng.randrange(2**31), 1, workers, 2, [name])
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

"""Plans of the soak test's episodes: the settings and faults of each, drawn from its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks import soak_job
from benchmarks.disruptions import DISRUPTIONS
from benchmarks.soak_control import format_disruption, parse_disruption
from rayzero.workers.chaos.spec import parse_fault, random_faults

STEPS_PER_FAULT = 20
WORLD_SIZE = 3
AT_START = 0.5
"""How often the first fault of an episode precedes its first step, if it can."""


@dataclass(frozen=True)
class Plan:
    """An episode, fully determined by its seed and its number and kinds of faults."""

    number: int
    seed: int
    stage: int
    steps: int
    faults: tuple[str, ...]


def plan(seed: int, number: int, count: int, kinds: Sequence[str], nodes: int) -> Plan:
    """Plan the episode with the given number for the given soak seed."""
    rng = random.Random(f"{seed}-{number}")
    episode_seed = rng.randrange(2**31)
    steps = STEPS_PER_FAULT * count
    faults: list[str] = []
    for part in range(count):
        step = rng.randint(max(2, STEPS_PER_FAULT * part), STEPS_PER_FAULT * (part + 1) - 1)
        drawn = [parsed[0] for text in faults if (parsed := parse_disruption(text))]
        allowed = [name for name in kinds if not _is_used_up(name, drawn)]
        faults.append(_draw_fault(rng, rng.choice(allowed or kinds), step, nodes, not part))
    return Plan(number, episode_seed, rng.randrange(4), steps + soak_job.TAIL, tuple(faults))


def _is_used_up(name: str, drawn: list[str]) -> bool:
    return name in DISRUPTIONS and 0 < DISRUPTIONS[name].per_episode <= drawn.count(name)


def _draw_fault(rng: random.Random, name: str, step: int, nodes: int, is_first: bool) -> str:
    if (disruption := DISRUPTIONS.get(name)) is not None:
        at_start = disruption.at_start and is_first and rng.random() < AT_START
        return format_disruption(name, 0 if at_start else step)
    (fault,) = random_faults(rng.randrange(2**31), 1, WORLD_SIZE, 2, [name])
    return str(replace(fault, step=step, node=fault.node % nodes))


def kind_of(text: str) -> str:
    parsed = parse_disruption(text)
    return parsed[0] if parsed else parse_fault(text).kind

"""The random schedules of `nccl_faults`."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.support.nccl_like.settings import NcclLike

KINDS = ("kill", "stop", "kernel_error")
PHASES = ("data", "forward", "backward", "reduce", "update", "publish")
WORLD_SIZE = 3


@dataclass(frozen=True)
class Schedule:
    """One job.

    Args:
        faults: of the product's language.
        poison: pairs of a rank and the step in which a kernel of it fails.
    """

    number: int
    stage: int
    seed: int
    faults: tuple[str, ...]
    poison: tuple[tuple[int, int], ...]
    settings: NcclLike


def draw(seed: int, number: int) -> Schedule:
    """One or two faults, the second after a repair of the first, on a rank that exists then."""
    choose = random.Random(f"{seed} {number}")
    faults: list[str] = []
    poison: list[tuple[int, int]] = []
    ranks = WORLD_SIZE
    for first, last in ((3, 7), (10, 13))[: choose.choice((1, 2))]:
        kind, step, rank = (
            choose.choice(KINDS),
            choose.randint(first, last),
            choose.randrange(ranks),
        )
        ranks = WORLD_SIZE - 1
        if kind == "kernel_error":
            poison.append((rank, step))
        else:
            faults.append(f'{kind}(rank={rank}, step={step}, phase="{choose.choice(PHASES)}")')
    settings = NcclLike(
        seed=choose.randrange(2**31),
        abort_s=choose.choice((0.02, 0.2, 1.0)),
        garbage=choose.choice(("any", "nan", "plausible", "random")),
        late_error_s=choose.choice((None, 0.0, 0.3)),
        watchdog_s=choose.choice((0.0, 0.5, 30.0)),
    )
    stage = choose.randrange(4)
    return Schedule(number, stage, choose.randrange(1000), tuple(faults), tuple(poison), settings)

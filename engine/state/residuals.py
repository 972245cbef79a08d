"""Error feedback as named ranges: what compression has kept back of the gradients so far.

Over all ranks it adds up to the gradient that has not been applied, and that sum is what any change
of world size must keep.

| name | what | who holds it |
|---|---|---|
| `residual.terms.<rank>/<parameter>` | what coding that rank's gradients lost | that rank |
| `residual.sum/<parameter>` | what coding the sums lost (stage 0) | each rank its shard |
| `lowrank/<parameter>` | the last right factor | all; it is in rank 0's share |

On a load, rank r takes the terms of the saved ranks r, r + W, r + 2 W, ..., with W ranks now: at
the same W its own, bit by bit; of a larger world the sum of several; in a larger world some begin
with none. Sums are cut anew as any other tensor; where they have no place any more, they go with
the terms.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.state.parts import Part, named_part, part_of_unit
from rayzero.engine.state.table import LogicalTensor
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.unit import Unit
from rayzero.engine.zero.ways import GradientWay, Kept

log = logging.getLogger("rayzero.engine")

TERMS, SUM = "residual.terms.", "residual.sum"
_TERMS_OF = re.compile(r"residual\.terms\.(\d+)/")
Fill = Callable[[Sequence[Part]], None]


def residual_parts(runtime: ZeroRuntime) -> list[Part]:
    """This rank's share, which nobody else has in theirs."""
    rank = runtime.collectives.rank
    parts = []
    for kept in runtime.way.kept:
        parts.append(_terms(kept.unit, f"{TERMS}{rank}", kept.feedback.of_terms))
        if kept.feedback.of_sum is not None:
            parts.append(_sum(kept.unit, kept.feedback.of_sum))
    if rank == 0:
        parts += [named_part(name, one) for name, one in runtime.way.shared()]
    return parts


def residual_numbers(way: GradientWay) -> dict[str, Any]:
    """What the JSON part says of residuals."""
    return {"residual_factor": way.factor} if way.kept else {}


def load_residuals(
    runtime: ZeroRuntime,
    held: Mapping[str, LogicalTensor],
    document: Mapping[str, Any],
    fill: Fill,
) -> None:
    """Takes over what another world has kept back.

    Args:
        held: every logical tensor of the state that is loaded.
        document: its JSON part.
        fill: reads parts from it.
    """
    saved = sorted({int(found[1]) for name in held if (found := _TERMS_OF.match(name))})
    if saved and not runtime.way.kept:
        log.warning(
            "the state holds gradients that compression kept back; without error feedback they "
            "are dropped"
        )
    _load_shared(runtime.way, held, fill)
    rank, world_size = runtime.collectives.rank, runtime.collectives.world_size
    mine = [one for one in saved if one % world_size == rank]
    factor = document.get("residual_factor", 1.0) / runtime.way.factor
    for kept in runtime.way.kept:
        _load_unit(kept, mine, held, fill)
        if factor != 1.0:
            kept.feedback.scale(factor)


def _load_shared(way: GradientWay, held: Mapping[str, LogicalTensor], fill: Fill) -> None:
    """What is equal on all ranks; it begins anew where the state has it in another shape."""
    fill(
        [
            named_part(name, one)
            for name, one in way.shared()
            if name in held and held[name].shape == tuple(one.shape)
        ]
    )


def _load_unit(
    kept: Kept, saved: Sequence[int], held: Mapping[str, LogicalTensor], fill: Fill
) -> None:
    unit, feedback = kept.unit, kept.feedback
    landing = torch.empty_like(feedback.of_terms)
    kept.feedback.forget()
    for other in saved:
        _add(feedback.of_terms, _terms(unit, f"{TERMS}{other}", landing.zero_()), held, fill)
    target = feedback.of_terms[unit.shard] if feedback.of_sum is None else feedback.of_sum
    _add(target, _sum(unit, landing.zero_()[unit.shard]), held, fill)


def _add(target: Tensor, landing: Part, held: Mapping[str, LogicalTensor], fill: Fill) -> None:
    """Adds what the state holds of a part to `target`; nothing, where it holds nothing."""
    ranges = tuple(one for one in landing.ranges if one.name in held)
    if ranges:
        fill([replace(landing, ranges=ranges)])
        target.add_(landing.memory)


def _terms(unit: Unit, kind: str, memory: Tensor) -> Part:
    whole = slice(0, unit.layout.numel)
    return part_of_unit(unit.layout, kind, memory, whole, whole)


def _sum(unit: Unit, memory: Tensor) -> Part:
    return part_of_unit(unit.layout, SUM, memory, unit.shard, unit.shard)

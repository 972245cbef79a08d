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

from rayzero.engine.layout.state_index import LogicalTensor
from rayzero.engine.state.ranges import StateRange, range_of_unit, whole_tensor_range
from rayzero.engine.zero.reducer import GradReduction, UnitGradSpec, UnitResiduals
from rayzero.engine.zero.runtime import ZeroRuntime

log = logging.getLogger("rayzero.engine")

LOCAL_PREFIX, REDUCED_PREFIX = "residual.terms.", "residual.sum"


_LOCAL_PATTERN = re.compile(r"residual\.terms\.(\d+)/")


ReadRanges = Callable[[Sequence[StateRange]], None]


def residual_ranges(runtime: ZeroRuntime) -> list[StateRange]:
    """This rank's share, which nobody else has in theirs."""
    rank = runtime.collectives.rank
    parts = []
    for kept in runtime.grad_reduction.residuals:
        parts.append(_local_range(kept.unit, f"{LOCAL_PREFIX}{rank}", kept.feedback.local))
        if kept.feedback.reduced is not None:
            parts.append(_reduced_range(kept.unit, kept.feedback.reduced))
    if rank == 0:
        parts += [
            whole_tensor_range(name, one) for name, one in runtime.grad_reduction.replicated_state()
        ]
    return parts


def residual_metadata(way: GradReduction) -> dict[str, Any]:
    """What the JSON part says of residuals."""
    return {"residual_factor": way.residual_factor} if way.residuals else {}


def load_residuals(
    runtime: ZeroRuntime,
    held: Mapping[str, LogicalTensor],
    document: Mapping[str, Any],
    fill: ReadRanges,
) -> None:
    """Takes over what another world has kept back.

    Args:
        held: every logical tensor of the state that is loaded.
        document: its JSON part.
        fill: reads parts from it.
    """
    saved = sorted({int(found[1]) for name in held if (found := _LOCAL_PATTERN.match(name))})
    if saved and not runtime.grad_reduction.residuals:
        log.warning(
            "the state holds gradients that compression kept back; without error feedback they "
            "are dropped"
        )
    _load_replicated(runtime.grad_reduction, held, fill)
    rank, world_size = runtime.collectives.rank, runtime.collectives.world_size
    mine = [one for one in saved if one % world_size == rank]
    factor = document.get("residual_factor", 1.0) / runtime.grad_reduction.residual_factor
    for kept in runtime.grad_reduction.residuals:
        _load_unit_residuals(kept, mine, held, fill)
        if factor != 1.0:
            kept.feedback.scale(factor)


def _load_replicated(
    way: GradReduction, held: Mapping[str, LogicalTensor], fill: ReadRanges
) -> None:
    """What is equal on all ranks; it begins anew where the state has it in another shape."""
    fill(
        [
            whole_tensor_range(name, one)
            for name, one in way.replicated_state()
            if name in held and held[name].shape == tuple(one.shape)
        ]
    )


def _load_unit_residuals(
    kept: UnitResiduals, saved: Sequence[int], held: Mapping[str, LogicalTensor], fill: ReadRanges
) -> None:
    unit, feedback = kept.unit, kept.feedback
    landing = torch.empty_like(feedback.local)
    kept.feedback.reset()
    for other in saved:
        _add_saved(
            feedback.local,
            _local_range(unit, f"{LOCAL_PREFIX}{other}", landing.zero_()),
            held,
            fill,
        )
    target = feedback.local[unit.shard] if feedback.reduced is None else feedback.reduced
    _add_saved(target, _reduced_range(unit, landing.zero_()[unit.shard]), held, fill)


def _add_saved(
    target: Tensor, landing: StateRange, held: Mapping[str, LogicalTensor], fill: ReadRanges
) -> None:
    """Adds what the state holds of a part to `target`; nothing, where it holds nothing."""
    ranges = tuple(one for one in landing.ranges if one.name in held)
    if ranges:
        fill([replace(landing, ranges=ranges)])
        target.add_(landing.memory)


def _local_range(unit: UnitGradSpec, kind: str, memory: Tensor) -> StateRange:
    whole = slice(0, unit.layout.numel)
    return range_of_unit(unit.layout, kind, memory, whole, whole)


def _reduced_range(unit: UnitGradSpec, memory: Tensor) -> StateRange:
    return range_of_unit(unit.layout, REDUCED_PREFIX, memory, unit.shard, unit.shard)

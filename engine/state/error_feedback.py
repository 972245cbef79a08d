"""Error feedback residuals of gradient compression as named ranges.

Summed over all ranks they are the gradient that has not been applied yet; every change of world
size preserves that sum.

| name | contents | held by |
|---|---|---|
| `residual.terms.<rank>/<parameter>` | compression error of that rank's gradients | that rank |
| `residual.sum/<parameter>` | compression error of the sums (stage 0) | each rank its shard |
| `lowrank/<parameter>` | the last right factor | all; saved by rank 0 |

With W ranks now, rank r loads the local residuals of saved ranks r, r + W, r + 2 W, ...: its own
bit for bit at the same W, a sum in a smaller world; in a larger world some ranks start with zero.
Residuals of sums are resharded like other tensors, or added to the local ones if this run has none.
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
from rayzero.engine.zero.reducer import ErrorFeedback, GradReduction, UnitGradSpec
from rayzero.engine.zero.runtime import ZeroRuntime

log = logging.getLogger("rayzero.engine")

LOCAL_PREFIX, REDUCED_PREFIX = "residual.terms.", "residual.sum"


_LOCAL_PATTERN = re.compile(r"residual\.terms\.(\d+)/")


ReadRanges = Callable[[Sequence[StateRange]], None]


def residual_ranges(runtime: ZeroRuntime) -> list[StateRange]:
    """The residuals that this rank saves; no other rank saves them."""
    rank = runtime.collectives.rank
    parts = []
    for residuals in runtime.grad_reduction.residuals:
        parts.append(_local_range(residuals.unit, f"{LOCAL_PREFIX}{rank}", residuals.local))
        if residuals.reduced is not None:
            parts.append(_reduced_range(residuals.unit, residuals.reduced))
    if rank == 0:
        parts += [
            whole_tensor_range(name, value)
            for name, value in runtime.grad_reduction.replicated_state()
        ]
    return parts


def residual_metadata(reduction: GradReduction) -> dict[str, Any]:
    """The JSON part of the residuals."""
    return {"residual_factor": reduction.residual_factor} if reduction.residuals else {}


def load_residuals(
    runtime: ZeroRuntime,
    held: Mapping[str, LogicalTensor],
    document: Mapping[str, Any],
    fill: ReadRanges,
) -> None:
    """Load residuals saved by any number of ranks.

    Args:
        held: every logical tensor of the loaded state.
        document: its JSON part.
        fill: reads ranges from it.
    """
    saved = sorted({int(match[1]) for name in held if (match := _LOCAL_PATTERN.match(name))})
    if saved and not runtime.grad_reduction.residuals:
        log.warning(
            "the loaded state has error feedback residuals, which are dropped: this run compresses "
            "gradients without error feedback"
        )
    _load_replicated(runtime.grad_reduction, held, fill)
    rank, world_size = runtime.collectives.rank, runtime.collectives.world_size
    own = [saved_rank for saved_rank in saved if saved_rank % world_size == rank]
    factor = document.get("residual_factor", 1.0) / runtime.grad_reduction.residual_factor
    for residuals in runtime.grad_reduction.residuals:
        _load_unit_residuals(residuals, own, held, fill)
        if factor != 1.0:
            residuals.scale(factor)


def _load_replicated(
    reduction: GradReduction, held: Mapping[str, LogicalTensor], fill: ReadRanges
) -> None:
    """Load what is equal on all ranks; tensors saved in another shape keep their initial value."""
    fill(
        [
            whole_tensor_range(name, value)
            for name, value in reduction.replicated_state()
            if name in held and held[name].shape == tuple(value.shape)
        ]
    )


def _load_unit_residuals(
    residuals: ErrorFeedback,
    saved: Sequence[int],
    held: Mapping[str, LogicalTensor],
    fill: ReadRanges,
) -> None:
    unit = residuals.unit
    landing = torch.empty_like(residuals.local)
    residuals.reset()
    for saved_rank in saved:
        _add_saved(
            residuals.local,
            _local_range(unit, f"{LOCAL_PREFIX}{saved_rank}", landing.zero_()),
            held,
            fill,
        )
    target = residuals.local[unit.shard] if residuals.reduced is None else residuals.reduced
    _add_saved(target, _reduced_range(unit, landing.zero_()[unit.shard]), held, fill)


def _add_saved(
    target: Tensor, landing: StateRange, held: Mapping[str, LogicalTensor], fill: ReadRanges
) -> None:
    """Add the ranges of `landing` that the state holds to `target`."""
    ranges = tuple(held_range for held_range in landing.ranges if held_range.name in held)
    if ranges:
        fill([replace(landing, ranges=ranges)])
        target.add_(landing.memory)


def _local_range(unit: UnitGradSpec, kind: str, memory: Tensor) -> StateRange:
    whole = slice(0, unit.layout.numel)
    return range_of_unit(unit.layout, kind, memory, whole, whole)


def _reduced_range(unit: UnitGradSpec, memory: Tensor) -> StateRange:
    return range_of_unit(unit.layout, REDUCED_PREFIX, memory, unit.shard, unit.shard)

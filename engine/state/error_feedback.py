"""Error feedback residuals of gradient compression as named ranges, and state that is equal on all
ranks.

The sum of the residuals over all ranks is the gradient that has not been applied yet. Every change
of world size preserves this sum.

| name | contents | held by |
|---|---|---|
| `residual.terms.<rank>/<parameter>` | compression error of that rank's gradients | that rank |
| `residual.sum/<parameter>` | compression error of the sums (stage 0) | each rank its shard |
| `lowrank/<parameter>` | the latest right factor | all ranks; saved by rank 0 |

In a world of W ranks, rank r loads the sum of the local residuals of the saved ranks r, r + W,
r + 2 W, ... With an unchanged W these are its own residuals, bit for bit; in a larger world some
ranks start with zero. Residuals of sums are resharded like other tensors, or are added to the local
residuals if this run has no residuals of sums.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rayzero.engine.layout.state_index import LogicalTensor, StateSource
from rayzero.engine.optim.sharded_optimizer import ShardedOptimizer
from rayzero.engine.state.ranges import StateRange, range_of_unit, read_ranges, whole_tensor_range
from rayzero.engine.zero.grad_reduction import UnitGradSpec
from rayzero.engine.zero.runtime import ZeroRuntime

log = logging.getLogger("rayzero.engine")

LOCAL_PREFIX, REDUCED_PREFIX = "residual.terms.", "residual.sum"
_LOCAL_PATTERN = re.compile(r"residual\.terms\.(\d+)/")


def residual_ranges(
    runtime: ZeroRuntime, optimizer: ShardedOptimizer, *, owned: bool
) -> list[StateRange]:
    """Returns the residuals of this rank, which no other rank saves, and state that is equal on all
    ranks. With `owned`, only rank 0 returns the latter."""
    rank = runtime.collectives.rank
    parts = []
    for residuals in runtime.grad_reduction.residuals:
        parts.append(_local_range(residuals.unit, rank, residuals.local))
        if residuals.reduced is not None:
            parts.append(_reduced_range(residuals.unit, residuals.reduced))
    if rank == 0 or not owned:
        replicated = _replicated_state(runtime, optimizer)
        parts += [whole_tensor_range(name, value) for name, value in replicated]
    return parts


def _replicated_state(
    runtime: ZeroRuntime, optimizer: ShardedOptimizer
) -> Iterator[tuple[str, Tensor]]:
    yield from runtime.grad_reduction.replicated_state()
    yield from optimizer.replicated_state()


def load_residuals(
    runtime: ZeroRuntime,
    optimizer: ShardedOptimizer,
    held: Mapping[str, LogicalTensor],
    source: StateSource,
) -> None:
    """Loads residuals saved by any number of ranks. `held` has every logical tensor of the source.

    Tensors that are equal on all ranks keep their initial values if the saved shapes differ.
    """
    reduction = runtime.grad_reduction
    saved = sorted({int(match[1]) for name in held if (match := _LOCAL_PATTERN.match(name))})
    if saved and not reduction.residuals:
        log.warning(
            "the loaded state has error feedback residuals, which are dropped: this run compresses "
            "gradients without error feedback"
        )
    replicated = [
        whole_tensor_range(name, value)
        for name, value in _replicated_state(runtime, optimizer)
        if name in held and held[name].shape == tuple(value.shape)
    ]
    read_ranges(replicated, source)
    rank, world_size = runtime.collectives.rank, runtime.collectives.world_size
    factor = source.metadata(0).get("residual_factor", 1.0) / reduction.residual_factor
    for feedback in reduction.residuals:
        unit = feedback.unit
        landing = torch.empty_like(feedback.local)
        feedback.reset()
        for saved_rank in saved:
            if saved_rank % world_size == rank:
                saved_range = _local_range(unit, saved_rank, landing.zero_())
                _add_saved(feedback.local, saved_range, held, source)
        target = feedback.local[unit.shard] if feedback.reduced is None else feedback.reduced
        _add_saved(target, _reduced_range(unit, landing.zero_()[unit.shard]), held, source)
        if factor != 1.0:
            feedback.scale(factor)


def _add_saved(
    target: Tensor, landing: StateRange, held: Mapping[str, LogicalTensor], source: StateSource
) -> None:
    """Adds the ranges of `landing` that the source holds to `target`."""
    ranges = tuple(part for part in landing.ranges if part.name in held)
    if ranges:
        read_ranges([replace(landing, ranges=ranges)], source)
        target.add_(landing.memory)


def _local_range(unit: UnitGradSpec, rank: int, memory: Tensor) -> StateRange:
    kind = f"{LOCAL_PREFIX}{rank}"
    return range_of_unit(unit.layout, kind, memory, slice(0, unit.layout.numel))


def _reduced_range(unit: UnitGradSpec, memory: Tensor) -> StateRange:
    return range_of_unit(unit.layout, REDUCED_PREFIX, memory, unit.shard)

"""Which parameter's gradient is not finite: asked only when a run cannot go on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.errors import EngineError
from rayzero.engine.zero.unit import Unit


def overflow_error(units: Sequence[Unit], collectives: Collectives, scale: float) -> EngineError:
    """The error of an overflow at the lowest loss scale; the same on every rank. Collective."""
    found = _first(units, collectives)
    if found is None:
        where = "the norm of the gradients is not finite, though every element is"
    else:
        unit, param = found
        where = f"the gradient of {param!r}, in the unit {unit!r}, has inf or nan"
    return EngineError(
        f"an overflow at the lowest loss scale, {scale:g}: {where}",
        allowed="gradients that are finite at fp16.min_loss_scale. A lower scale cannot help "
        "when the loss itself is inf or nan, or an activation exceeds 65504",
        fix='"bf16": {"enabled": true} instead of fp16, where the hardware has it; a lower '
        "learning rate or gradient_clipping; or a look at the batch and the loss of this step",
    )


def _first(units: Sequence[Unit], collectives: Collectives) -> tuple[str, str] | None:
    """The unit and the parameter that backward reached first, out of those that are not finite.

    Units are in the order of backward; inside one, its last parameter comes first.
    """
    rank, named, counts = collectives.rank, [], list[Tensor]()
    for unit in units:
        if unit.grads is None:
            continue
        own = unit.grads.counted(unit.shard)
        bad = torch.zeros(len(unit.layout.params), dtype=torch.float64, device=own.device)
        for piece in unit.layout.pieces(rank):
            part = own[piece.shard_start : piece.shard_start + piece.numel]
            bad[piece.param] = (~part.isfinite()).sum()
        counts.append(bad.flip(0))
        named += [(unit.name, spec.name) for spec in reversed(unit.layout.params)]
    if not counts:
        return None
    totals = torch.cat(counts)
    collectives.vote(totals)
    return next((name for name, total in zip(named, totals.tolist(), strict=True) if total), None)

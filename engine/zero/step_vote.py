"""The step's vote: one small all-reduce of gradient norm, finiteness, loss and requests.

If a run cannot continue because of an overflow, the vote's error names the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.device import Device, get_device
from rayzero.engine.errors import CollectiveError, EngineError
from rayzero.engine.session import NO_REQUESTS, StepRequests
from rayzero.engine.zero.unit import Unit


@dataclass(frozen=True)
class StepVote:
    """The outcome of the vote, equal on all ranks.

    Attributes:
        grad_norm: the L2 norm of the summed gradient, before clipping.
        loss: the mean loss over the global batch.
        agreed: the ranks' common decision on their requests.
        used: the sums over the ranks of the `used` that they gave to `vote_on_step`.
    """

    grad_norm: float
    loss: float
    agreed: StepRequests = NO_REQUESTS
    used: tuple[float, ...] = ()

    @property
    def finite(self) -> bool:
        return isfinite(self.grad_norm)

    def clip_factor(self, max_norm: float) -> float:
        """The factor of clipping, as in `torch.nn.utils.clip_grad_norm_`."""
        return min(1.0, max_norm / (self.grad_norm + 1e-6)) if max_norm else 1.0


def vote_on_step(
    parts: Iterable[Tensor],
    loss: Tensor,
    factor: float,
    collectives: Collectives,
    requests: StepRequests = NO_REQUESTS,
    used: Sequence[float] = (),
) -> StepVote:
    """Agrees on a step.

    Args:
        parts: this rank's parts of the summed gradients. Over all ranks, each element occurs once.
            Iterating waits for the copies of offloaded parts to the host.
        loss: this rank's weighted loss, a scalar. The mean loss is the sum over the ranks.
        factor: the factor by which the gradients are still to be multiplied.
        requests: this rank's requests.
        used: numbers to be summed over the ranks: the votes of `UnusedParams`.
    """
    # Timed and reported as a wait: the copies wait for the reductions.
    sequence = collectives.counters.sequence
    summed = collectives.run_timed("a copy", sequence, lambda: list(parts), list[Tensor])
    if collectives.broken:
        raise CollectiveError(collectives.broken)
    scalars = torch.stack((_squared_norm(summed, get_device(loss.device)), loss.detach().double()))
    requested = requests.to_scalars()
    square, mean, *sums = collectives.sum_scalars(scalars, [*requested, *used])
    agreed = StepRequests.from_sums(sums[: len(requested)], collectives.world_size)
    return StepVote(factor * square**0.5, mean, agreed, tuple(sums[len(requested) :]))


def _squared_norm(parts: list[Tensor], device: Device) -> Tensor:
    """Returns the squared L2 norm of all parts, a float64 on the device. The norm of the parts in
    host memory is computed there, and one number is copied to the device."""
    if not device.separate_memory:
        return _l2_norm(parts).double().square()
    on_device = [part for part in parts if device.owns(part)]
    offloaded = [part for part in parts if not device.owns(part)]
    total = device.to_device(_l2_norm(on_device)).double().square()
    if offloaded:
        total += device.to_device(_l2_norm(offloaded)).double().square()
    return total


def _l2_norm(parts: list[Tensor]) -> Tensor:
    """Returns the L2 norm of parts that are in one memory. Norms of 16-bit parts are computed in
    float32, because fp16 would overflow."""
    narrow = [part for part in parts if part.dtype.itemsize < 4]
    if not narrow:
        return get_total_norm(parts)
    wide = [part for part in parts if part.dtype.itemsize >= 4]
    return get_total_norm([*wide, *torch._foreach_norm(narrow, 2.0, torch.float32)])


def nonfinite_error(units: Sequence[Unit], collectives: Collectives, scale: float) -> EngineError:
    """Returns the error, equal on all ranks, for overflow at the lowest loss scale. Collective."""
    culprit = _first_nonfinite_param(units, collectives)
    if culprit is None:
        where = "the norm of the gradients is not finite, though every element is"
    else:
        unit, param = culprit
        where = f"the gradient of {param!r}, in the unit {unit!r}, has inf or nan"
    return EngineError(
        f"an overflow at the lowest loss scale, {scale:g}: {where}",
        allowed="gradients that are finite at fp16.min_loss_scale. A lower scale cannot help "
        "when the loss itself is inf or nan, or an activation exceeds 65504",
        fix='"bf16": {"enabled": true} instead of fp16, if the hardware supports it; a lower '
        "learning rate or gradient_clipping; or check the batch and the loss of this step",
    )


def _first_nonfinite_param(
    units: Sequence[Unit], collectives: Collectives
) -> tuple[str, str] | None:
    """Returns the unit and name of the first parameter in backward order whose gradient is not
    finite.

    Units are in the order of backward. Within a unit, the last parameter comes first.
    """
    named, counts = [], list[float]()
    for unit in units:
        own = unit.shard_grads()
        if own is None:
            continue
        bad = torch.zeros(len(unit.layout.params), dtype=torch.float64, device=own.device)
        for part in unit.layout.overlaps(unit.shard):
            bad[part.index] = (~own[part.memory].isfinite()).sum()
        counts += get_device(own.device).read(bad.flip(0))
        named += [(unit.name, spec.name) for spec in reversed(unit.layout.params)]
    if not counts:
        return None
    totals = collectives.sum_numbers(counts)
    return next((name for name, total in zip(named, totals, strict=True) if total), None)

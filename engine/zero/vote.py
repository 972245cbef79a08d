"""The one small all-reduce of a step: gradient norm, finiteness, loss and wishes share it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.session import NO_WISHES, Wishes


@dataclass(frozen=True)
class Verdict:
    """What the ranks found together; equal on all of them.

    Attributes:
        grad_norm: the L2 norm of the summed gradient, before clipping.
        loss: the mean loss over the global batch.
        agreed: the ranks' wishes, counted.
    """

    grad_norm: float
    loss: float
    agreed: Wishes = NO_WISHES

    @property
    def finite(self) -> bool:
        return isfinite(self.grad_norm)

    def clip_factor(self, max_norm: float) -> float:
        """What gradients are multiplied by, as in `torch.nn.utils.clip_grad_norm_`."""
        return min(1.0, max_norm / (self.grad_norm + 1e-6)) if max_norm else 1.0


def take_vote(
    parts: Iterable[Tensor],
    loss: Tensor,
    factor: float,
    collectives: Collectives,
    wishes: Wishes = NO_WISHES,
) -> Verdict:
    """Agrees on a step.

    Args:
        parts: this rank's parts of the summed gradients; over all ranks, each element once.
        loss: this rank's weighted loss, a scalar; the ranks' add up to the mean.
        factor: what the gradients are still to be multiplied by.
        wishes: this rank's.
    """
    norm = _norm(list(parts)).to(loss.device)  # gradients may rest in host memory
    found = torch.stack((norm.double().square(), loss.detach().double()))
    ballot = torch.cat((found, found.new_tensor(wishes.ballot())))
    collectives.vote(ballot)
    square, mean, *sums = ballot.tolist()
    agreed = Wishes.counted(sums, collectives.world_size)
    return Verdict(grad_norm=factor * square**0.5, loss=mean, agreed=agreed)


def _norm(parts: list[Tensor]) -> Tensor:
    """The L2 norm of all parts; of 16-bit ones in float32, because in fp16 it would overflow."""
    narrow = [part for part in parts if part.dtype.itemsize < 4]
    if not narrow:
        return get_total_norm(parts)
    wide = [part for part in parts if part.dtype.itemsize >= 4]
    return get_total_norm([*wide, *torch._foreach_norm(narrow, 2.0, torch.float32)])

"""The one small all-reduce of a step: gradient norm, finiteness and loss share it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from rayzero.engine.comm.collectives import Collectives


@dataclass(frozen=True)
class Verdict:
    """What the ranks found together; equal on all of them.

    Attributes:
        grad_norm: the L2 norm of the summed gradient, before clipping.
        loss: the mean loss over the global batch.
    """

    grad_norm: float
    loss: float

    @property
    def finite(self) -> bool:
        return isfinite(self.grad_norm)

    def clip_factor(self, max_norm: float) -> float:
        """What gradients are multiplied by, as in `torch.nn.utils.clip_grad_norm_`."""
        return min(1.0, max_norm / (self.grad_norm + 1e-6)) if max_norm else 1.0


def take_vote(
    parts: Iterable[Tensor], loss: Tensor, factor: float, collectives: Collectives
) -> Verdict:
    """Agrees on a step.

    Args:
        parts: this rank's parts of the summed gradients; over all ranks, each element once.
        loss: this rank's weighted loss, a scalar; the ranks' add up to the mean.
        factor: what the gradients are still to be multiplied by.
    """
    norm = get_total_norm(list(parts))
    ballot = torch.stack((norm.double().square(), loss.detach().double().to(norm.device)))
    collectives.vote(ballot)
    square, mean = ballot.tolist()
    return Verdict(grad_norm=factor * square**0.5, loss=mean)

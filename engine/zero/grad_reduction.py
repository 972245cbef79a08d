"""How a run's gradients are reduced: uncompressed, or as `compression` does it.

Compressed reductions keep residuals of each unit, which are part of the training state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rayzero.engine.comm.backend import ReduceOp
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.layout.flat_layout import UnitLayout


@dataclass(frozen=True)
class UnitGradSpec:
    """One trainable unit's main gradients.

    Attributes:
        dtype: the main gradients' dtype.
        shard: this rank's range of the flat layout.
        replicated: every rank gets all reduced gradients, not only its shard.
    """

    layout: UnitLayout
    dtype: torch.dtype
    shard: slice
    replicated: bool

    @property
    def name(self) -> str:
        return self.layout.name


@dataclass(frozen=True)
class ErrorFeedback:
    """One unit's residuals of compression on this rank. They are part of the training state.

    Attributes:
        local: the residuals of this rank's gradients, in the unit's flat layout.
        reduced: the residuals of the reduced shard. None if that is not compressed.
    """

    unit: UnitGradSpec
    local: Tensor
    reduced: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.local] if self.reduced is None else [self.local, self.reduced]

    def reset(self) -> None:
        """Sets the residuals, which may not be finite, to zero."""
        for residual in self.tensors:
            residual.zero_()

    def scale(self, factor: float) -> None:
        """Adapts the residuals to gradients of another scale."""
        for residual in self.tensors:
            residual.mul_(factor)


class GradReduction:
    """Chooses how a run's gradients are reduced. This class reduces them uncompressed, subclasses
    in `compression` quantized or as low-rank factors.

    Args:
        factor: the initial `residual_factor`.

    Attributes:
        residuals: the residuals of the units with error feedback.
        residual_factor: the factor from residuals to units of the mean gradient. It depends on the
            loss scale, and on the world size if gradients are averaged after the reduction.
    """

    def __init__(self, collectives: Collectives, factor: float) -> None:
        self.residuals: list[ErrorFeedback] = []
        self.residual_factor = factor
        self._collectives = collectives

    def reduce_op(self, unit: UnitGradSpec) -> ReduceOp:
        """Returns the operation that reduces a unit's gradients. Called once per unit."""
        return self._collectives

    def replicated_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) of training state that is equal on all ranks."""
        yield from ()

    def clip_limit(self, limit: float) -> float:
        """Returns the norm to clip this step to, or 0 for no clipping. `limit` is the config's."""
        return limit

    def discard_residuals(self) -> None:
        """Called when a step is skipped: its gradient, maybe not finite, is not to be applied."""
        for feedback in self.residuals:
            feedback.reset()

    def rescale(self, ratio: float) -> None:
        """Called when the loss scale, and so all later gradients, are multiplied by `ratio`. That
        is a power of two, so the residuals are not rounded."""
        for feedback in self.residuals:
            feedback.scale(ratio)
        self.residual_factor /= ratio

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the payload buffers."""
        return 0

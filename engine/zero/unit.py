"""A unit at run time: its tensors on this rank, by stage, precision and layout."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from rayzero.engine.layout.flat_layout import UnitLayout
from rayzero.engine.offload.stores import StateStore
from rayzero.engine.zero.gradients import GradStore
from rayzero.engine.zero.parameters import WeightStore


@dataclass(frozen=True)
class Unit:
    """Owns one unit's tensors.

    Attributes:
        params: the model's parameters, in the layout's order.
        weights: the model weights.
        main_weights: the main weights of the range `owned`. They share the model weights' memory if
            both have the same dtype. None for a frozen unit.
        grads: the gradients; None for a frozen unit.
        owned: the range of the flat layout that this rank's optimizer updates.
        shard: this rank's shard; equal to `owned` unless the optimizer state is replicated.
        module: the block whose forward needs the unit gathered; None if weights are replicated.
        state_store: holds main weights and optimizer state.
    """

    layout: UnitLayout
    params: tuple[nn.Parameter, ...]
    weights: WeightStore
    main_weights: Tensor | None
    grads: GradStore | None
    owned: slice
    shard: slice
    module: nn.Module | None
    state_store: StateStore

    @property
    def name(self) -> str:
        return self.layout.name

    def shard_grads(self) -> Tensor | None:
        """The main gradients of this rank's shard. None for a frozen unit. The shards of all ranks
        together have each element exactly once, as a sum over ranks needs it."""
        if self.grads is None:
            return None
        start = self.owned.start
        return self.grads.owned()[self.shard.start - start : self.shard.stop - start]

"""A unit at run time: what the stage, the precision and the layout made of it on this rank."""

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
        main: the main weights of `owned`; the same memory as the model weights when both have one
            dtype. None for a frozen unit.
        grads: the gradients; None for a frozen unit.
        owned: the part of the flat layout that this rank's optimizer updates.
        shard: this rank's shard; equal to `owned` unless the optimizer state is replicated.
        block: the module whose forward needs the unit gathered; None when weights are resident.
        home: where main weights and optimizer state rest.
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

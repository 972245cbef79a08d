"""The ZeRO stages as rows of a table, and the collective for each change of placement.

Method: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020. No other module branches on the stage's number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Placement(Enum):
    """Distribution of one logical tensor over the ranks."""

    REPLICATED = "replicated"  # every rank holds all of it, equal
    PARTIAL = "partial"  # every rank holds a term of a sum
    SHARDED = "sharded"  # every rank holds its own part


class Collective(Enum):
    """The communication that changes a placement."""

    NONE = "none"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"


@dataclass(frozen=True)
class Stage:
    """One row: the placement of each kind of tensor between two micro-steps.

    The main weights are placed as the optimizer state is.
    """

    number: int
    model_weights: Placement
    main_grads: Placement
    optimizer_state: Placement

    def for_world_size(self, world_size: int, *, is_fixed: bool = True) -> Stage:
        """Returns the row for `world_size` ranks. Nothing is sharded on a single rank whose world
        size is fixed."""
        return Stage(self.number, R, P, R) if world_size == 1 and is_fixed else self

    def without_micro_step_reductions(self) -> Stage:
        """Returns this row with gradients that ranks accumulate in full and reduce once a step."""
        partial = self.main_grads is Placement.SHARDED
        return replace(self, main_grads=Placement.PARTIAL) if partial else self

    @property
    def shards_weights(self) -> bool:
        return self.model_weights is Placement.SHARDED

    @property
    def gradient_collective(self) -> Collective:
        """The reduction of gradients that the optimizer needs."""
        return _COLLECTIVES[Placement.PARTIAL, self.optimizer_state]

    @property
    def weight_collective(self) -> Collective:
        """The gather of updated weights that forward needs."""
        return _COLLECTIVES[self.optimizer_state, self.model_weights]


R = Placement.REPLICATED
P = Placement.PARTIAL
S = Placement.SHARDED

#                 model weights  main grads  optimizer state
STAGES = (
    Stage(0, R, P, R),
    Stage(1, R, P, S),
    Stage(2, R, S, S),
    Stage(3, S, S, S),
)

_COLLECTIVES = {  # by placement before and after
    (P, R): Collective.ALL_REDUCE,
    (P, S): Collective.REDUCE_SCATTER,
    (S, R): Collective.ALL_GATHER,
    (R, R): Collective.NONE,
    (S, S): Collective.NONE,
}

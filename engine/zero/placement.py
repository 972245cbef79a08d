"""The stages as rows of data, and the collective that each change of placement is.

Method: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020. Nothing outside this table asks for the stage's number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Placement(Enum):
    """How one logical tensor lies over the ranks."""

    REPLICATED = "replicated"  # every rank holds all of it, equal
    PARTIAL = "partial"  # every rank holds a term of the sum
    SHARDED = "sharded"  # every rank holds its own part


class Collective(Enum):
    """The traffic that changes a placement."""

    NONE = "none"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"


@dataclass(frozen=True)
class Stage:
    """One row: where each kind of tensor lies between two micro-steps.

    The main weights lie as the optimizer state does.
    """

    number: int
    model_weights: Placement
    main_grads: Placement
    optimizer_state: Placement

    def for_world_size(self, world_size: int, *, moves: bool = False) -> Stage:
        """This row on so many ranks: on one, a shard is the whole and nothing has to move.

        Args:
            moves: what is sharded rests in other memory than the device's, so that a shard moves
                even on one rank.
        """
        return self if world_size > 1 or moves else Stage(self.number, R, P, R)

    @property
    def state_replicated(self) -> bool:
        """Whether every rank holds all that has to outlive a step."""
        return self.optimizer_state is Placement.REPLICATED

    @property
    def gradient_collective(self) -> Collective:
        """What brings the sum of the ranks' gradients to where the optimizer needs it."""
        return collective_for(Placement.PARTIAL, self.optimizer_state)

    @property
    def weight_collective(self) -> Collective:
        """What brings updated weights to where forward needs them, or keeps them, whole."""
        return collective_for(self.optimizer_state, self.model_weights)


R, P, S = Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED

#                 model weights  main grads  optimizer state
STAGES = (
    Stage(0, R, P, R),
    Stage(1, R, P, S),
    Stage(2, R, S, S),
    Stage(3, S, S, S),
)

_COLLECTIVE_BY_CHANGE = {
    (P, R): Collective.ALL_REDUCE,
    (P, S): Collective.REDUCE_SCATTER,
    (S, R): Collective.ALL_GATHER,
}


def collective_for(source: Placement, target: Placement) -> Collective:
    """The collective that turns one placement into another.

    Raises:
        ValueError: no single collective does that.
    """
    if source is target:
        return Collective.NONE
    if (source, target) not in _COLLECTIVE_BY_CHANGE:
        raise ValueError(f"no collective turns {source.value} into {target.value}")
    return _COLLECTIVE_BY_CHANGE[source, target]

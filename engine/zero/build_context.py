"""The inputs from which a run's `ZeroRuntime` is built."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.config import EngineConfig
from rayzero.engine.offload.plan import Offload
from rayzero.engine.precision.policy import Precision
from rayzero.engine.zero.deferred_init import Materializer
from rayzero.engine.zero.placement import Stage
from rayzero.engine.zero.scratch import ScratchBuffer


@dataclass(frozen=True)
class BuildContext:
    """The context that all units of a run have in common.

    Attributes:
        restoring: a state is loaded right after the build, so initial values do not matter.
        elastic: the host chooses the world size, and may change it.
        unequal: tensors that are in no state and may differ between ranks. They get rank 0's values
            when the state is loaded. Building a restored engine thus waits for no other rank.
    """

    config: EngineConfig
    stage: Stage
    precision: Precision
    collectives: Collectives
    device: torch.device
    materializer: Materializer
    scratch: ScratchBuffer
    offload: Offload
    restoring: bool = False
    elastic: bool = False
    unequal: list[Tensor] = field(default_factory=list)

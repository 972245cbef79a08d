"""What a run goes by once its config is solved for a world."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayzero.engine.config import BatchSizes, EngineConfig


@dataclass(frozen=True)
class Settings:
    """Fixed for one world size.

    Attributes:
        stage: the ZeRO stage.
        batches: samples a step, samples a micro-batch, micro-steps a step.
        clip_norm: gradients are clipped to this L2 norm; 0 for never.
        log_every_steps: rank 0 logs every so many steps; None for never.
        device: where the model is.
        share: the weight of a micro-batch of average size.
        factor: what summed gradients are still to be multiplied by, but for the loss scale; see
            `rayzero.engine.precision.policy`.
        config: the checked config that all of it follows from.
    """

    stage: int
    batches: BatchSizes
    clip_norm: float
    log_every_steps: int | None
    device: torch.device
    micro_batch_weight: float
    post_reduce_scale: float
    config: EngineConfig

    def initial_grad(self, weight: float) -> float:
        """What backward starts from for a micro-batch of this weight, but for the loss scale."""
        return weight / self.post_reduce_scale

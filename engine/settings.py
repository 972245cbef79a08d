"""The settings of a run: its config with the defaults, resolved for one world size."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rayzero.engine.config import BatchSizes, EngineConfig
from rayzero.engine.config.parse import ParsedConfig, parse_with_provenance
from rayzero.engine.errors import ConfigError
from rayzero.engine.session import HostSession

log = logging.getLogger("rayzero.engine")

ConfigLike = str | Path | dict[str, Any] | EngineConfig

# torch's own defaults
DEFAULT_OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 1e-2}}


@dataclass(frozen=True)
class Settings:
    """Fixed for one world size, except for the batch sizes.

    Attributes:
        stage: the ZeRO stage.
        batches: samples per step, samples per micro-batch, micro-steps per step.
        clip_norm: gradients are clipped to this L2 norm; 0 for never.
        log_every_steps: rank 0 logs a line every this many steps; None for never.
        device: of the model.
        micro_batch_weight: the weight of a micro-batch of average size.
        post_reduce_scale: reduced gradients are still to be multiplied by it, and divided by the
            loss scale; see `rayzero.engine.precision.policy`.
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
        """The gradient of a micro-batch's loss of this weight, before loss scaling."""
        return weight / self.post_reduce_scale

    def with_batch_sizes(self, micro_batch: int, micro_steps: int, world_size: int) -> Settings:
        """These settings with another number of samples per step."""
        sizes = BatchSizes(micro_batch * micro_steps * world_size, micro_batch, micro_steps)
        weight = 1.0 / (micro_steps * world_size)
        return replace(self, batches=sizes, micro_batch_weight=weight)


def resolve_config(
    config: ConfigLike | None,
    optimizer: object | None,
    lr_scheduler: object | None,
    session: HostSession | None,
) -> ParsedConfig:
    """The given config, else the job's, else the defaults.

    Raises:
        ConfigError: the config is wrong, or has no optimizer where one is needed.
    """
    if config is None and session is not None:
        config = session.engine_config
    if config is None and optimizer is None:
        if is_rank_zero():
            log.warning(
                "neither a config nor an optimizer was given: AdamW with a learning rate of 1e-3, "
                "and the default of every other setting, are used"
            )
        return parse_with_provenance({"optimizer": DEFAULT_OPTIMIZER})
    parsed = parse_with_provenance(config)
    if optimizer is None and parsed.config.optimizer is None:
        has_scheduler = lr_scheduler is not None or parsed.config.scheduler is not None
        _check_evaluation_only(in_job=session is not None, has_scheduler=has_scheduler)
    return parsed


def _check_evaluation_only(*, in_job: bool, has_scheduler: bool) -> None:
    """Without an optimizer the engine only evaluates: refuses what only training has a use for."""
    seen = "a rayzero job, which trains" if in_job else "a scheduler" if has_scheduler else None
    if seen is not None:
        raise ConfigError(
            f"there is no optimizer, but {seen}",
            allowed='"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}} in the engine '
            "config, or initialize(optimizer=...)",
        )
    if is_rank_zero():
        log.warning(
            "no optimizer was given: the engine only evaluates, and the model's parameters are "
            "frozen"
        )


def is_rank_zero() -> bool:
    """By the environment: before a process group exists."""
    return int(os.environ.get("RANK", "0")) == 0

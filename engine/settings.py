"""The settings of a run: its config with the defaults, resolved for one world size."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayzero.engine.config import EngineConfig
from rayzero.engine.config.parse import ParsedConfig, parse_with_provenance
from rayzero.engine.data.batch_sizes import BatchSizes
from rayzero.engine.errors import ConfigError
from rayzero.engine.session import HostSession

log = logging.getLogger("rayzero.engine")

ConfigLike = str | Path | dict[str, Any] | EngineConfig

# torch's own defaults
DEFAULT_OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 1e-2}}


@dataclass(frozen=True)
class Settings:
    """A run's checked config, and what follows from it for one world size."""

    config: EngineConfig
    batches: BatchSizes
    # Reduced gradients have yet to be multiplied by this, and divided by the loss scale; see
    # `rayzero.engine.precision.policy`.
    post_reduce_scale: float
    # `gradient_allreduce_op`: the number of ranks for sum, 1 for mean.
    gradient_factor: float = 1.0


def resolve_config(
    config: ConfigLike | None,
    optimizer: object | None,
    lr_scheduler: object | None,
    session: HostSession,
) -> ParsedConfig:
    """Returns the given config, else the job's, else the defaults. Raises ConfigError if the config
    is wrong, or has a scheduler and no optimizer."""
    if config is None:
        config = session.engine_config
    if config is None and optimizer is None:
        _warn_once_per_job(
            "neither a config nor an optimizer was given: AdamW with a learning rate of 1e-3, and "
            "the default of every other setting, are used"
        )
        config = {"optimizer": DEFAULT_OPTIMIZER}
    parsed = parse_with_provenance(session.adapt_config(config))
    if parsed.config.autotuning.enabled:
        _warn_once_per_job(
            "config: autotuning is enabled, and this run tries nothing: "
            "`rayzero launch --autotuning run SCRIPT` does"
        )
    if optimizer is None and parsed.config.optimizer is None:
        if lr_scheduler is not None or parsed.config.scheduler is not None:
            raise ConfigError(
                "there is no optimizer, but a scheduler",
                allowed='"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}} in the engine '
                "config, or initialize(optimizer=...)",
            )
        _warn_once_per_job(
            "no optimizer was given: the engine only evaluates, and the model's parameters are "
            "frozen"
        )
    return parsed


def _warn_once_per_job(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # there may be no process group yet
        log.warning(text)

"""The engine's config: DeepSpeed's keys and a few of our own, read, checked and explained.

No torch. `document` is the config as a model, its sections lie beside it by theme; `keys` is the
table that says of every key of DeepSpeed whether it is implemented, a no-op or refused; `parse` is
the way from what a user gave to a checked config. This file is the door to them.
"""

from rayzero.engine.config.batch_sizes import BatchSizes, resolve_batch_sizes
from rayzero.engine.config.model import EngineConfig, OptimizerConfig, SchedulerConfig
from rayzero.engine.config.parse import parse_config, read_config

__all__ = [
    "BatchSizes",
    "EngineConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "parse_config",
    "read_config",
    "resolve_batch_sizes",
]

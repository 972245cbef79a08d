"""The engine's config: DeepSpeed's keys and rayzero's, parsed, checked and explained. No torch.

`model` is the whole document and its fields carry their `Key` metadata; `unsupported` has the keys
of DeepSpeed without a field; `parse` turns a file or dict into a checked config.
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

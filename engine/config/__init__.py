"""The engine's config: DeepSpeed's keys and rayzero's, parsed, checked and explained. No torch.

`model` is the whole document, whose fields carry their `Key` metadata; `parse` turns a file or dict
into a checked config.
"""

from rayzero.engine.config.model import EngineConfig, OptimizerConfig, SchedulerConfig
from rayzero.engine.config.parse import parse_config, read_config

__all__ = [
    "EngineConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "parse_config",
    "read_config",
]

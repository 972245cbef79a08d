"""rayzero: ZeRO training of PyTorch models on Ray clusters that keep changing.

This is the public door. Names are loaded on first use, so that `import rayzero` costs neither
torch nor ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayzero.engine.api.entry import initialize
    from rayzero.engine.data.dataset import ParquetTokens
    from rayzero.engine.engine import Engine
    from rayzero.engine.errors import ConfigError, EngineError, RayzeroError
    from rayzero.engine.zero.deferred import zero_init
    from rayzero.orchestrator.api import Job, JobHandle, JobResult, Workers
    from rayzero.workers.context import Context

__version__ = "0.1.0"

_HOMES = {
    "initialize": "rayzero.engine.api.entry",
    "zero_init": "rayzero.engine.zero.deferred",
    "Engine": "rayzero.engine.engine",
    "ParquetTokens": "rayzero.engine.data.dataset",
    "RayzeroError": "rayzero.engine.errors",
    "ConfigError": "rayzero.engine.errors",
    "EngineError": "rayzero.engine.errors",
    "Context": "rayzero.workers.context",
    "Job": "rayzero.orchestrator.api",
    "JobHandle": "rayzero.orchestrator.api",
    "JobResult": "rayzero.orchestrator.api",
    "Workers": "rayzero.orchestrator.api",
}

__all__ = [
    "ConfigError",
    "Context",
    "Engine",
    "EngineError",
    "Job",
    "JobHandle",
    "JobResult",
    "ParquetTokens",
    "RayzeroError",
    "Workers",
    "__version__",
    "initialize",
    "zero_init",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rayzero' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""rayzero: ZeRO training of PyTorch models on Ray clusters that keep changing.

The public API. Names are imported on first use, so that `import rayzero` loads neither torch nor
ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayzero.deepspeed.entry import initialize
    from rayzero.engine.api.load_pretrained import load_pretrained
    from rayzero.engine.data.dataset import ParquetTokens
    from rayzero.engine.engine import Engine
    from rayzero.engine.errors import ConfigError, EngineError, RayzeroError
    from rayzero.engine.zero.deferred_init import zero_init
    from rayzero.orchestrator.job.api import Job, Role
    from rayzero.orchestrator.job.handle import JobHandle
    from rayzero.orchestrator.results import JobResult
    from rayzero.orchestrator.spec import Rollouts, Workers
    from rayzero.workers.context import Context
    from rayzero.workers.roles.context import RoleContext

__version__ = "0.1.0"

_HOMES = {
    "initialize": "rayzero.deepspeed.entry",
    "load_pretrained": "rayzero.engine.api.load_pretrained",
    "zero_init": "rayzero.engine.zero.deferred_init",
    "Engine": "rayzero.engine.engine",
    "ParquetTokens": "rayzero.engine.data.dataset",
    "RayzeroError": "rayzero.engine.errors",
    "ConfigError": "rayzero.engine.errors",
    "EngineError": "rayzero.engine.errors",
    "Context": "rayzero.workers.context",
    "RoleContext": "rayzero.workers.roles.context",
    "Job": "rayzero.orchestrator.job.api",
    "JobHandle": "rayzero.orchestrator.job.api",
    "JobResult": "rayzero.orchestrator.job.api",
    "Role": "rayzero.orchestrator.job.api",
    "Rollouts": "rayzero.orchestrator.job.api",
    "Workers": "rayzero.orchestrator.job.api",
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
    "Role",
    "RoleContext",
    "Rollouts",
    "Workers",
    "__version__",
    "initialize",
    "load_pretrained",
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

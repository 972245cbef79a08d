"""DeepSpeed's names over rayzero's engine, for scripts that say `import deepspeed`.

`rayzero.deepspeed.install()` makes `import deepspeed`, and its submodules that are here, mean this
package; `python -m rayzero.deepspeed script.py ...` runs a script with that done. The files here
only rename: what a name means is written in `rayzero.engine`.
"""

from __future__ import annotations

from typing import Any

from rayzero.deepspeed import checkpointing, comm, ops, runtime, utils, zero
from rayzero.deepspeed.accelerator import get_accelerator
from rayzero.deepspeed.arguments import add_config_arguments
from rayzero.deepspeed.install import install
from rayzero.deepspeed.refused import unsupported_message
from rayzero.deepspeed.start import initialize
from rayzero.deepspeed.utils.logging import log_dist, logger
from rayzero.engine.api.deepspeed_engine import DeepSpeedEngine
from rayzero.engine.comm.process_group import init_distributed
from rayzero.engine.errors import ConfigError as DeepSpeedConfigError

__version__ = "0.19.8+rayzero"
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8

__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "install",
    "log_dist",
    "logger",
    "ops",
    "runtime",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(unsupported_message(f"deepspeed.{name}", __all__))

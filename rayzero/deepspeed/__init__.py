"""DeepSpeed's names over rayzero's engine, for scripts that say `import deepspeed`.

`rayzero.deepspeed.install()` makes `import deepspeed` and its submodules mean this package;
`python -m rayzero.deepspeed script.py ...` runs a script with that done. `engine.py` has
DeepSpeed's engine, over rayzero's; `names.toml` has all names.
"""

from __future__ import annotations

from argparse import ArgumentParser
from functools import wraps
from typing import Any

from rayzero.deepspeed import comm, ops, utils
from rayzero.deepspeed.accelerator import get_accelerator
from rayzero.deepspeed.engine import DeepSpeedEngine
from rayzero.deepspeed.entry import initialize as rayzero_initialize
from rayzero.deepspeed.install import add_alias_modules, install
from rayzero.deepspeed.lookup import resolve
from rayzero.deepspeed.utils import log_dist, logger
from rayzero.engine.comm.process_group import init_distributed
from rayzero.engine.errors import ConfigError as DeepSpeedConfigError

__version__ = "0.19.8+rayzero"
git_hash = git_branch = __git_hash__ = __git_branch__ = None  # of no checkout of DeepSpeed
__version_major__ = 0
__version_minor__ = 19
__version_patch__ = 8

__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "__version__",
    "add_config_arguments",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "install",
    "log_dist",
    "logger",
    "ops",
    "utils",
]
__all__ += ["checkpointing", "runtime", "zero"]  # set by `add_alias_modules`


@wraps(rayzero_initialize)
def initialize(*arguments: Any, **options: Any) -> Any:
    """Calls `rayzero.initialize`, after making sure that there is a process group.

    A script that runs alone gets a group of one rank, because it may ask torch.distributed for its
    rank.
    """
    init_distributed(
        distributed_port=options.get("distributed_port", 29500),
        dist_init_required=options.get("dist_init_required"),
    )
    return rayzero_initialize(*arguments, **options)


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config FILE`, and their old names; returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "configuration of the training engine")
    group.add_argument(
        "--deepspeed", action="store_true", help="for the script's own use; the engine ignores it"
    )
    group.add_argument("--deepspeed_config", type=str, help="path of the config file")
    group.add_argument("--deepscale", action="store_true", help="old name of --deepspeed")
    group.add_argument("--deepscale_config", type=str, help="old name of --deepspeed_config")
    return parser


def __getattr__(name: str) -> Any:
    return resolve("", name)


add_alias_modules()

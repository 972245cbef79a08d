"""Makes `import deepspeed` mean rayzero's alias package, in this process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType
from typing import Any

from rayzero.deepspeed.refused import ALTERNATIVES, unsupported_message
from rayzero.engine.errors import ConfigError

log = logging.getLogger("rayzero.deepspeed")

_PACKAGE = "rayzero.deepspeed"
_NOT_ALIASED = {f"{_PACKAGE}.{name}" for name in ("__main__", "install", "refused", "start")}


def install() -> None:
    """Puts this package, and every module in it, into `sys.modules` as `deepspeed`.

    Said once, on rank 0. Safe to repeat.

    Raises:
        ConfigError: DeepSpeed itself has been imported already.
    """
    home = import_module(_PACKAGE)
    loaded = sys.modules.get("deepspeed")
    if loaded is home:
        return
    if loaded is not None:
        raise ConfigError(
            f"deepspeed was imported before, from {loaded.__file__}",
            fix="rayzero.deepspeed.install() before the first `import deepspeed`",
        )
    for name in _list_modules(home):
        sys.modules[name.replace(_PACKAGE, "deepspeed", 1)] = import_module(name)
    sys.meta_path.insert(0, _UnsupportedFinder())
    if int(os.environ.get("RANK", "0")) == 0:
        log.warning("`import deepspeed` means rayzero's engine in this process")


def _list_modules(home: ModuleType) -> list[str]:
    found = walk_packages(home.__path__, f"{_PACKAGE}.")
    return [_PACKAGE, *(one.name for one in found if one.name not in _NOT_ALIASED)]


class _UnsupportedFinder:
    """Asked for submodules that are not in `sys.modules`, before anybody else: says what is."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> Any:
        full = name.replace(_PACKAGE, "deepspeed", 1)
        if full.partition(".")[0] != "deepspeed" or name in _NOT_ALIASED:
            return None
        parent = full.rpartition(".")[0]
        top = ".".join(full.split(".")[:2])
        raise ModuleNotFoundError(
            unsupported_message(
                full if full in ALTERNATIVES else top if top in ALTERNATIVES else full,
                _public_names(parent),
            ),
            name=full,  # not `name`: from-imports swallow an error about just that
        )


def _public_names(parent: str) -> list[str]:
    """What a module of ours offers."""
    module = sys.modules.get(parent)
    return list(getattr(module, "__all__", ())) or [
        name.rpartition(".")[2] for name in sys.modules if name.startswith(f"{parent}.")
    ]

"""The modules of `deepspeed` as one table, and `install`, which aliases `import deepspeed` to them.

A row of `MODULES` is a module of DeepSpeed's and where its names are defined. Modules with a file
here (`comm`, `utils`, ...) have no row.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from rayzero.engine.api.alternatives import PACKAGE_ALTERNATIVES, unsupported_message
from rayzero.engine.errors import ConfigError

log = logging.getLogger("rayzero.deepspeed")

_PACKAGE = "rayzero.deepspeed"
_FILES = ("accelerator", "comm", "ops", "utils")
_INTERNAL = {f"{_PACKAGE}.{name}" for name in ("__main__", "install", *_FILES)}
_INTERNAL.add(f"{_PACKAGE}.zero_to_fp32")


def _names(home: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, home)


_ZERO = _names("rayzero.engine.api.params", "GatheredParameters", "Init")
_CHECKPOINTING = _names(
    "rayzero.engine.api.activation_checkpointing",
    *("checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"),
)

MODULES: Mapping[str, Mapping[str, str]] = {
    "accelerator.real_accelerator": _names("rayzero.deepspeed.accelerator", "get_accelerator"),
    "checkpoint": {},
    "checkpoint.utils": _names("rayzero.deepspeed.utils", "clone_tensors_for_torch_save"),
    "checkpointing": _CHECKPOINTING,
    "ops.adam": _names("rayzero.deepspeed.ops", "DeepSpeedCPUAdam", "FusedAdam"),
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.dataloader": _names("rayzero.deepspeed.utils", "RepeatingLoader"),
    "runtime.engine": _names("rayzero.deepspeed", "DeepSpeedEngine"),
    "runtime.lr_schedules": _names(
        "rayzero.deepspeed.ops",
        *("LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"),
        "VALID_LR_SCHEDULES",
    ),
    "runtime.zero": _ZERO,
    "runtime.zero.partition_parameters": _ZERO,
    "utils.logging": _names("rayzero.deepspeed.utils", "log_dist", "logger"),
    "utils.zero_to_fp32": _names(
        "rayzero.deepspeed.zero_to_fp32",
        "convert_zero_checkpoint_to_fp32_state_dict",
        "get_fp32_state_dict_from_zero_checkpoint",
        "load_state_dict_from_zero_checkpoint",
    ),
    "zero": _ZERO,
}
"""{module below `deepspeed`: {name in it: the module that defines it}}."""


class _AliasModule(ModuleType):
    """A row of `MODULES` as a module; its names are imported on first use."""

    def __init__(self, name: str, homes: Mapping[str, str]) -> None:
        super().__init__(f"{_PACKAGE}.{name}", f"`deepspeed.{name}`.")
        self.__all__ = sorted(homes)
        self.__path__: list[str] = []  # a package, so that submodules are asked of the finder
        self._homes = homes

    def __getattr__(self, name: str) -> Any:
        if name not in self._homes:
            full = f"{self.__name__}.{name}".replace(_PACKAGE, "deepspeed", 1)
            raise AttributeError(unsupported_message(full, self.__all__))
        value = getattr(import_module(self._homes[name]), name)
        setattr(self, name, value)
        return value


def add_alias_modules() -> None:
    """Enters the table's modules in `sys.modules`, below this package. Called by its `__init__`."""
    for name in _FILES:
        import_module(f"{_PACKAGE}.{name}").__path__ = []
    for name, homes in MODULES.items():
        _add_module(name, _AliasModule(name, homes))
    _add_module("comm.comm", sys.modules[f"{_PACKAGE}.comm"])


def _add_module(name: str, module: ModuleType) -> None:
    full = f"{_PACKAGE}.{name}"
    sys.modules[full] = module
    parent, _, child = full.rpartition(".")
    setattr(sys.modules[parent], child, module)
    if isinstance(above := sys.modules[parent], _AliasModule):
        above.__all__.append(child)


def install() -> None:
    """Makes `import deepspeed`, and its submodules, mean this package in this process. Logged once,
    on rank 0. Safe to repeat. Raises ConfigError if DeepSpeed itself has been imported already."""
    package = import_module(_PACKAGE)
    loaded = sys.modules.get("deepspeed")
    if loaded is package:
        return
    if loaded is not None:
        raise ConfigError(
            f"deepspeed was imported before, from {loaded.__file__}",
            fix="rayzero.deepspeed.install() before the first `import deepspeed`",
        )
    sys.modules["deepspeed"] = package
    for name in (*_FILES, *MODULES, "comm.comm"):
        sys.modules[f"deepspeed.{name}"] = sys.modules[f"{_PACKAGE}.{name}"]
    sys.meta_path.insert(0, _Finder())
    if int(os.environ.get("RANK", "0")) == 0:
        log.warning("`import deepspeed` means rayzero's engine in this process")


class _Distribution(Distribution):
    """What the package metadata says of `deepspeed`: transformers and accelerate ask there first
    whether it is installed, and in which version."""

    def read_text(self, filename: str) -> str | None:
        version = sys.modules[_PACKAGE].__version__.partition("+")[0]
        fields = f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n"
        return fields if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(sys.modules[_PACKAGE].__file__ or "").parent / path


_ANY = DistributionFinder.Context()


class _Finder(DistributionFinder):
    """Refuses submodules that are not in `sys.modules`, naming those that are."""

    def find_distributions(
        self, context: DistributionFinder.Context = _ANY
    ) -> Iterator[Distribution]:
        if context.name in (None, "deepspeed"):
            yield _Distribution()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> Any:
        full = name.replace(_PACKAGE, "deepspeed", 1)
        if full.partition(".")[0] != "deepspeed" or name in _INTERNAL:
            return None
        top = ".".join(full.split(".")[:2])
        subject = top if full not in PACKAGE_ALTERNATIVES and top in PACKAGE_ALTERNATIVES else full
        raise ModuleNotFoundError(
            unsupported_message(subject, sys.modules[full.rpartition(".")[0]].__all__),
            name=full,  # not `name`: from-imports swallow an error about just that
        )

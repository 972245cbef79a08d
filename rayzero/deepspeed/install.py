"""DeepSpeed's modules in `sys.modules`, and `install`, which makes `import deepspeed` mean them.

The table in `names.toml` has their contents; `lookup.py` resolves each name on first use.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from rayzero.deepspeed.lookup import (
    MODULES,
    REFUSED_PACKAGES,
    defined_in,
    missing_message,
    package_refusal,
    public_names,
    resolve,
)
from rayzero.engine.errors import ConfigError

log = logging.getLogger("rayzero.deepspeed")

_PACKAGE = "rayzero.deepspeed"
_FILES = ("accelerator", "comm", "ops", "utils")  # modules of DeepSpeed that have a file here
_INTERNAL = {f"{_PACKAGE}.{path.stem}" for path in Path(__file__).parent.glob("*.py")}


class _AliasModule(ModuleType):
    """A module of DeepSpeed; its names are resolved on first use."""

    def __init__(self, name: str) -> None:
        full = f"{_PACKAGE}.{name}"
        super().__init__(full, f"`deepspeed.{name}`.")
        self.__spec__ = ModuleSpec(full, None, is_package=True)
        self.__path__: list[str] = []  # makes it a package, whose submodules `_Finder` finds
        self.__all__ = public_names(name)
        self._module = name

    def __getattr__(self, name: str) -> Any:
        value = resolve(self._module, name)
        setattr(self, name, value)
        return value


def add_alias_modules() -> None:
    """Adds the table's modules to `sys.modules`, below this package. Called by its `__init__`."""
    for name in _FILES:
        import_module(f"{_PACKAGE}.{name}").__path__ = []
    for name in sorted({*MODULES, *REFUSED_PACKAGES} - {*_FILES}):
        module = sys.modules[f"{_PACKAGE}.comm"] if name == "comm.comm" else _AliasModule(name)
        full = f"{_PACKAGE}.{name}"
        sys.modules[full] = module
        parent, _, child = full.rpartition(".")
        # `deepspeed.utils.z3_leaf_module` is the function of that name, not the module.
        if defined_in(parent.partition(f"{_PACKAGE}.")[2], child) in (None, _PACKAGE):
            setattr(sys.modules[parent], child, module)


def install() -> None:
    """Makes `import deepspeed`, and its submodules, mean this package in this process. Logs that
    once, on rank 0. Safe to repeat.

    Raises:
        ConfigError: DeepSpeed itself has been imported already.
    """
    package = import_module(_PACKAGE)
    loaded = sys.modules.get("deepspeed")
    if loaded is package:
        return
    if loaded is not None:
        raise ConfigError(
            f"deepspeed was imported before, from {loaded.__file__}",
            fix="call rayzero.deepspeed.install() before the first `import deepspeed`",
        )
    sys.modules["deepspeed"] = package
    for name in (*_FILES, *MODULES, *REFUSED_PACKAGES):
        sys.modules[f"deepspeed.{name}"] = sys.modules[f"{_PACKAGE}.{name}"]
    sys.meta_path.insert(0, _Finder())
    if int(os.environ.get("RANK", "0")) == 0:
        log.info("`import deepspeed` means rayzero's engine in this process")


class _Distribution(Distribution):
    """The package metadata of `deepspeed`. transformers and accelerate read it to find out whether
    DeepSpeed is installed, and in which version."""

    def read_text(self, filename: str) -> str | None:
        version = sys.modules[_PACKAGE].__version__.partition("+")[0]
        fields = f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n"
        return fields if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(sys.modules[_PACKAGE].__file__ or "").parent / path


class _AliasLoader(Loader):
    """Loads submodules of modules that rayzero refuses as a whole."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AliasModule(spec.name.replace(f"{_PACKAGE}.", "", 1).removeprefix("deepspeed."))

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: names are resolved on first use."""


_ANY = DistributionFinder.Context()


class _Finder(DistributionFinder):
    """Refuses submodules that are not in the table; the error lists the known ones."""

    def find_distributions(
        self, context: DistributionFinder.Context = _ANY
    ) -> Iterator[Distribution]:
        if context.name in (None, "deepspeed"):
            yield _Distribution()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        full = name.replace(_PACKAGE, "deepspeed", 1)
        if full.partition(".")[0] != "deepspeed" or name in _INTERNAL:
            return None
        module = full.partition(".")[2]
        if package_refusal(module):
            return ModuleSpec(name, _AliasLoader(), is_package=True)
        raise ModuleNotFoundError(
            missing_message(full, module.rpartition(".")[0]),
            name=full,  # not `name`: a from-import swallows an error with that name
        )

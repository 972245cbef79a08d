"""Patches libraries that run the loop themselves, when and if the script imports them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from rayzero.workers.launch.accelerated import patch_accelerator
from rayzero.workers.launch.trainer import patch_trainer

_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "accelerate.accelerator": patch_accelerator,
    "transformers.trainer": patch_trainer,
}


def patch_libraries() -> None:
    """From now on each module of the table is patched once: now, or after its import."""
    if any(isinstance(finder, _PatchingFinder) for finder in sys.meta_path):
        return
    for name, patch in _PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _PatchingFinder())


class _PatchingFinder(MetaPathFinder):
    """Finds what the others find, and patches it when it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _PATCHES:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _PATCHES[name](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

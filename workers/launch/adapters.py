"""Adapters connect rayzero to the libraries that launched scripts use. They are in packages that
this one does not import.

An adapter is a function that the launch request names as `module:function` (`launch.adapters` in
the job file). It is called once in a process, before the script imports anything, and registers
what to do when

- a library is imported: `on_import`, with a function that patches the library by `wrap`. Only
  targets listed in `engine/patches.py`, or added by `patches.declare`, can be patched;
- the script begins: `on_begin`;
- the training state is saved and loaded: `session.registry.register(name, get, set)`;
- the script's loop begins: the attributes of `session.loop` say how the loop continues after a
  fault; `session.follow_loop(engine)` is called for a loop that repeats a lost step;
- a batch is read: a `FollowedLoop` waits for the ranks, and knows which steps were lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeAlias

from rayzero.engine.patches import replace
from rayzero.engine.session import current_session
from rayzero.workers.entrypoint import resolve_entrypoint
from rayzero.workers.session import JobSession

Patch: TypeAlias = Callable[[ModuleType], None]
Original: TypeAlias = Callable[..., Any]
"""A function that `wrap` has replaced."""

_installed = set[str]()
_patches: dict[str, list[Patch]] = {}
_beginnings: list[Callable[[Mapping[str, Any]], None]] = []
preloaded = set[str]()
"""Packages to import while a process waits for its first generation, if the script imports them.
Imported later, they would make the process's peers wait."""


def install_adapters(names: Iterable[str]) -> None:
    """Calls each adapter that has not been called in this process."""
    for name in names:
        if name not in _installed:
            _installed.add(name)
            resolve_entrypoint(name)()  # type: ignore[call-arg]


def begin_script(launch: Mapping[str, Any]) -> None:
    for begin in _beginnings:
        begin(launch)


def on_begin(begin: Callable[[Mapping[str, Any]], None]) -> None:
    """Registers a function to be called with the fields of `launch:` before a script begins."""
    _beginnings.append(begin)


def on_import(name: str, patch: Patch) -> None:
    """Registers a function to be called with a module: now if the module is imported, otherwise
    after its import."""
    if name in sys.modules:
        patch(sys.modules[name])
    if not _patches:
        sys.meta_path.insert(0, _PatchingFinder())
    _patches.setdefault(name, []).append(patch)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replaces a function of a class or a module. In a job, the replacement calls `around` with the
    session, the original function and the arguments; elsewhere it calls the original function."""
    original = getattr(owner, name)

    @wraps(original)
    def wrapper(*args: Any, **options: Any) -> Any:
        session = current_session()
        if not isinstance(session, JobSession):
            return original(*args, **options)
        return around(session, original, *args, **options)

    replace(owner, name, wrapper)


class _PatchingFinder(MetaPathFinder):
    """Patches the modules of `on_import` when they are loaded, wherever other finders find them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _patches:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                if module.__name__ == name:  # a loader may load other modules, too
                    for patch in _patches[name]:
                        patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

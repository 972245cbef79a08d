"""Adapters: rayzero's side of the libraries that launched scripts use. They live in packages that
this one does not import.

An adapter is a function, which the launch request names as `module:function` (`launch.adapters` in
the job file). It is called once in a process, before anything of the script is imported, and says
what is to happen when:

- a library is imported: `on_import`, with a function that patches it by `wrap`, which takes what
  `engine/patches.py` lists, or the adapter has added by `patches.declare`;
- the script begins: `on_begin`;
- the training state is saved and loaded: `session.registry.register(name, get, set)`;
- the script's loop begins: `session.loop`, whose attributes say how it continues after a fault, and
  `session.follow_loop(engine)`, for one that does a lost step again;
- a batch is read: `FollowedLoop`, which waits for the ranks and knows what was lost.
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
"""A function that is replaced by `wrap`."""

_installed = set[str]()
_patches: dict[str, list[Patch]] = {}
_beginnings: list[Callable[[Mapping[str, Any]], None]] = []
preloaded = set[str]()
"""Packages that a process imports, if the script does, while it waits for its first generation:
there they would make its peers wait."""


def install_adapters(names: Iterable[str]) -> None:
    """Calls the adapters that were not called in this process before."""
    for name in names:
        if name not in _installed:
            _installed.add(name)
            resolve_entrypoint(name)()  # type: ignore[call-arg]


def begin_script(launch: Mapping[str, Any]) -> None:
    for begin in _beginnings:
        begin(launch)


def on_begin(begin: Callable[[Mapping[str, Any]], None]) -> None:
    """`begin` is called with the fields of `launch:` before a script begins."""
    _beginnings.append(begin)


def on_import(name: str, patch: Patch) -> None:
    """`patch` is called with that module: now if it is imported, else after its import."""
    if name in sys.modules:
        patch(sys.modules[name])
    if not _patches:
        sys.meta_path.insert(0, _PatchingFinder())
    _patches.setdefault(name, []).append(patch)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replaces a function of a class or a module: in a job `around` is called with the session, the
    original and its arguments. Elsewhere nothing changes."""
    original = getattr(owner, name)

    @wraps(original)
    def wrapper(*args: Any, **options: Any) -> Any:
        session = current_session()
        if not isinstance(session, JobSession):
            return original(*args, **options)
        return around(session, original, *args, **options)

    replace(owner, name, wrapper)


class _PatchingFinder(MetaPathFinder):
    """Finds the modules that other finders find, and patches them when they are loaded."""

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

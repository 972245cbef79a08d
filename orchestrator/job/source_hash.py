"""A hash of the code that a job trains with, which distinguishes jobs of the same name.

The hash covers the file of the function or script, and the modules of the job's folder that the
file imports, directly or through others. The files are read, not imported.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from rayzero.orchestrator.job.entrypoint_check import source_in
from rayzero.orchestrator.spec import JobSpec

MAX_MODULES = 100
"""At most this many modules are hashed, the first in the order of imports, so that a job does not
wait while all of a large library is read."""
_NOT_THE_USERS = ("rayzero",)
_INSTALLED = "site-packages"
_UNREADABLE = (OSError, TypeError, SyntaxError, ValueError, RecursionError)


@dataclass(frozen=True)
class _Module:
    """A module's file. `package` is the one to which the module's relative imports refer; empty if
    there is none."""

    path: Path
    package: str = ""


def hash_source(spec: JobSpec, folder: str, function: Callable[[Any], Any] | None = None) -> str:
    """Returns the hash of a job's code: the file of the function or script, or only the source of a
    given `function`, and the local modules that the file imports. Comments and formatting do not
    count. Returns an empty string if the source cannot be read.

    Args:
        folder: where the workers import from first.
    """
    with suppress(*_UNREADABLE):
        if function is not None:
            source = textwrap.dedent(inspect.getsource(function))
            path = Path(inspect.getsourcefile(function) or "")
            package = sys.modules[function.__module__].__package__ or ""
            return _hash(_parse(source), _Module(path, package), _roots(folder, path))
        if spec.launch is not None and spec.launch.script:
            path = Path(folder, spec.launch.script)
            return _hash(_parse(path.read_bytes()), _Module(path), [path.parent, Path(folder)])
        name = spec.launch.module if spec.launch is not None else spec.entrypoint
        module = _find(str(name).partition(":")[0], [Path(folder)])
        if module is not None:
            return _hash(_parse(module.path.read_bytes()), module, [Path(folder)])
    return ""


def _roots(folder: str, path: Path) -> list[Path]:
    """Returns the folders from which a function's file imports local modules. Returns none if the
    file is not in the job's folder, or is part of an installed package there."""
    top = Path(folder).absolute()
    if not path.absolute().is_relative_to(top) or _INSTALLED in path.parts:
        return []
    return [path.parent, top]


def _hash(tree: ast.Module, start: _Module, roots: Sequence[Path]) -> str:
    """Hashes syntax trees. The version of Python is included, because the trees depend on it."""
    text = [f"{sys.version_info[:2]}{ast.dump(tree)}"]
    text += [f"{name}\n{code}" for name, code in sorted(_local_code(start, roots).items())]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _local_code(start: _Module, roots: Sequence[Path]) -> dict[str, str]:
    """Returns the syntax trees of the modules in `roots` that a module imports, directly or through
    others, by their paths."""
    code: dict[str, str] = {}
    waiting, seen = deque([start]), {start.path.absolute()}
    while waiting and len(code) < MAX_MODULES:
        module = waiting.popleft()
        try:
            tree = _parse(module.path.read_bytes())
        except _UNREADABLE:
            continue  # the process that imports the module gets the error
        if module is not start:
            code[_relative_path(module.path, roots)] = ast.dump(tree)
        for name in _imported_names(tree, module.package):
            found = _find(name, roots)
            if found is not None and found.path.absolute() not in seen:
                seen.add(found.path.absolute())
                waiting.append(found)
    return code


def _relative_path(path: Path, roots: Sequence[Path]) -> str:
    root = next(root for root in roots if path.is_relative_to(root))
    return str(path.relative_to(root))


def _find(name: str, roots: Sequence[Path]) -> _Module | None:
    for root in roots:
        if (path := source_in(str(root), name)) is not None:
            is_package = path.name == "__init__.py"
            return _Module(path, name if is_package else name.rpartition(".")[0])
    return None


def _imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """Yields the names of modules that a module imports, with their packages. Of `from package
    import name`, `package.name` is included, because it may be a module."""
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                base = node.module or ""
                if node.level:
                    with suppress(ImportError):  # beyond the top package
                        base = resolve_name("." * node.level + base, package)
                names = [f"{base}.{alias.name}".strip(".") for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] not in _NOT_THE_USERS:
                yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


def _parse(source: str | bytes) -> ast.Module:
    try:
        return ast.parse(source)
    except SystemError:  # two threads parsed at once, in Python 3.11 (python/cpython#106905)
        return ast.parse(source)

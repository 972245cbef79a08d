"""Finds a mistake in `entrypoint` by reading the source, before a cluster or a worker starts.

Nothing is imported: a user's module may take long, or need what only the workers have. What cannot
be told from the source is left to the workers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from rayzero.workers.entrypoint import missing_module_error, missing_name_error


def check_entrypoint(entrypoint: str, folder: str, *, only_here: bool) -> None:
    """Raises EntryPointError if there is no such module, or no such name in it.

    Args:
        entrypoint: `module:function`.
        folder: where the workers import from first.
        only_here: whether the workers are on this machine; others may have modules that it has not.
    """
    module, _, path = entrypoint.partition(":")
    top = module.partition(".")[0]
    source = _source_in(folder, module)
    if source is None:
        if only_here and not _is_found(top, folder):
            raise missing_module_error(entrypoint, top, folder)
        return
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # the worker's error has a traceback
    names = set(_defined_names(tree.body))
    name = path.partition(".")[0]
    if name not in names and names.isdisjoint(("*", "__getattr__", "globals")):
        raise missing_name_error(entrypoint, name, str(source), sorted(names))


def _source_in(folder: str, module: str) -> Path | None:
    base = Path(folder, *module.split("."))
    candidates = (base / "__init__.py", base.with_name(f"{base.name}.py"))
    return next((path for path in candidates if path.is_file()), None)


def _is_found(top: str, folder: str) -> bool:
    try:
        return PathFinder.find_spec(top, [folder]) is not None or find_spec(top) is not None
    except (ImportError, ValueError):  # of a finder, or of a module without a spec
        return True


def _defined_names(body: list[ast.stmt]) -> Iterator[str]:
    """What a module's statements bind, `*` for what they import by that; more than that, if they
    call `globals`."""
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name
            case ast.Import() | ast.ImportFrom():
                yield from ((it.asname or it.name).partition(".")[0] for it in statement.names)
            case _:
                yield from (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
                for node in ast.walk(statement):
                    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.alias)
                    if isinstance(node, inner):
                        yield (getattr(node, "asname", None) or node.name).partition(".")[0]

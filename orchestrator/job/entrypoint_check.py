"""Finds mistakes in a job before a cluster or a worker starts.

The function of `entrypoint` is checked by its source. Nothing is imported, because a user's module
may take long to import, or need what only the workers have. Mistakes that the source does not show
are left to the workers.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from inspect import Signature, signature
from pathlib import Path
from symtable import symtable

from rayzero.engine.errors import did_you_mean
from rayzero.orchestrator.checkpoint_store import check_resume_exists
from rayzero.orchestrator.spec import JobSpec
from rayzero.workers.entrypoint import (
    EntryPointError,
    check_signature,
    missing_module_error,
    missing_name_error,
    no_plain_function_error,
    not_callable_error,
)

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def check_early(spec: JobSpec, folder: str, *, has_function: bool) -> None:
    """Checks a job that is to run on this machine, because a mistake would otherwise fail in the
    job's process many seconds later. Raises ConfigError if the function does not exist or cannot be
    called, or there is no such checkpoint to resume from.

    Args:
        folder: the folder from which the workers import first.
        has_function: the job was given a function, not its name.
    """
    if not has_function:
        check_entrypoint(spec.entrypoint, folder, only_here=True)
    if spec.launch is not None and spec.launch.module is not None:
        _check_module(spec.launch.module, folder)
    check_resume_exists(spec.checkpoint.resume)


def check_entrypoint(entrypoint: str, folder: str, *, only_here: bool) -> None:
    """Raises EntryPointError if the module does not exist, is not valid Python or does not have the
    name, or if the name's value cannot be called with ctx.

    Args:
        entrypoint: `module:function`.
        folder: the folder from which the workers import first.
        only_here: all workers are on this machine. Other machines may have other modules; they have
            the same version of Python, because Ray lets no others join.
    """
    module, _, path = entrypoint.partition(":")
    source = source_in(folder, module)
    if source is None:
        if missing := _missing_part(folder, module, only_here=only_here):
            raise missing_module_error(entrypoint, missing, folder, _modules_in(folder, missing))
        return
    try:
        tree = ast.parse(source.read_bytes(), str(source))
    except OSError:
        return  # the worker's error has a traceback
    except (SyntaxError, ValueError) as error:
        raise EntryPointError(syntax_problem(str(source), error), "a module in Python") from None
    names, name = _defined_names(tree), path.partition(".")[0]
    if name not in names and names.isdisjoint(("__getattr__", "globals")):
        raise missing_name_error(entrypoint, name, str(source), sorted(names))
    _check_definition(entrypoint, tree, path.split("."))


def _check_module(module: str, folder: str) -> None:
    """Raises EntryPointError if a module to run as `__main__` does not exist on this machine."""
    if source_in(folder, module) is not None:
        return
    if missing := _missing_part(folder, module, only_here=True):
        raise EntryPointError(
            f"there is no module {missing!r}{did_you_mean(missing, _modules_in(folder, missing))}",
            allowed=f"a module that can be imported from {folder}",
            fix="run `rayzero launch -m MODULE`",
        )


def syntax_problem(path: str, error: SyntaxError | ValueError) -> str:
    """Returns a text such as `train.py:3: invalid syntax: def train(ctx`."""
    line, text = getattr(error, "lineno", None), getattr(error, "text", None)
    place = f"{path}:{line}" if line else path
    return f"{place}: {getattr(error, 'msg', error)}" + (f": {text.strip()}" if text else "")


def source_in(folder: str, module: str) -> Path | None:
    """Returns the file of a module in the folder; None if the module is not there."""
    base = Path(folder, *module.split("."))
    candidates = (base / "__init__.py", base.with_name(f"{base.name}.py"))
    return next((path for path in candidates if path.is_file()), None)


def _missing_part(folder: str, module: str, *, only_here: bool) -> str:
    """Returns the name of the module, or of the package above it, that does not exist. Returns an
    empty string if all exist, or that cannot be known."""
    top, *parts = module.split(".")
    spec = PathFinder.find_spec(top, [folder])
    # A package without an `__init__` may have parts in other folders.
    if spec is None or spec.origin is None:
        return top if only_here and spec is None and not _is_installed(top) else ""
    name = top
    for part in parts:
        if (places := _import_path(spec)) is None:
            return ""
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, places)
        if spec is None:
            return name
    return ""


def _is_installed(top: str) -> bool:
    try:
        return find_spec(top) is not None
    except (ImportError, ValueError):  # a finder fails, or the module has no spec
        return True


def _import_path(package: ModuleSpec) -> Sequence[str] | None:
    """Returns the folders of a package's modules; None if the package may set them itself."""
    if package.submodule_search_locations is None:
        return []
    try:
        sets_path = package.origin and "__path__" in Path(package.origin).read_text("utf-8")
    except (OSError, ValueError):
        sets_path = True
    return None if sets_path else list(package.submodule_search_locations)


def _modules_in(folder: str, missing: str) -> list[str]:
    """Returns the modules and packages next to which the missing one was looked for."""
    *parents, _ = missing.split(".")
    place = Path(folder, *parents)
    found = [path.stem for path in place.glob("*.py")]
    found += [path.parent.name for path in place.glob("*/__init__.py")]
    return [".".join([*parents, name]) for name in sorted(found) if name.isidentifier()]


def _defined_names(tree: ast.Module) -> set[str]:
    """Returns the names that a module binds. Includes `globals` if the module may bind others,
    because it uses `globals` or imports `*`."""
    symbols = symtable(ast.unparse(tree), "", "exec").get_symbols()
    names = {
        symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()
    }
    if any(symbol.get_name() == "globals" for symbol in symbols):
        names.add("globals")
    if any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(tree)):
        names.add("globals")
    return names


def _check_definition(entrypoint: str, tree: ast.Module, path: list[str]) -> None:
    """Checks the definition of a function, a method or a plain value, unless other code in the
    module may replace it."""
    found: ast.stmt | None = None
    body = tree.body
    for name in path:
        found = _only_definition(tree, body, name)
        body = found.body if isinstance(found, ast.ClassDef) else []
    match found:
        case ast.Assign() | ast.AnnAssign() if (kind := _plain_type(found.value)) is not None:
            raise not_callable_error(f"entrypoint {entrypoint!r}", kind)
        case ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]):
            if (kind := _returned_at_once(found)) is not None:
                raise no_plain_function_error(found.name, kind)
            check_signature(found.name, _signature(found.args))


def _only_definition(tree: ast.Module, body: list[ast.stmt], name: str) -> ast.stmt | None:
    """Returns the statement of `body` that binds the name; None if another one may bind it, too."""
    bound = [node for node in ast.walk(tree) if _binds(node, name)]
    for statement in body if len(bound) == 1 else ():
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        if any(bound[0] is node for node in (statement, *targets)):
            return statement
    return None


def _binds(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Name(ctx=ast.Store() | ast.Del()):
            return node.id == name
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.name == name
        case ast.alias():
            return (node.asname or node.name) in (name, "*")
    return False


def _plain_type(value: ast.expr | None) -> str | None:
    """Returns the type of a literal; None for an expression that may be callable."""
    match value:
        case ast.Constant():
            return type(value.value).__name__
        case ast.List() | ast.Dict() | ast.Tuple() | ast.Set():
            return type(value).__name__.lower()
    return None


def _returned_at_once(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """Returns what a call of the function returns before its body has run: "a coroutine" or "a
    generator". Returns None for a plain function."""
    nodes: list[ast.AST] = list(function.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return "a generator"
        nodes += [] if isinstance(node, _SCOPES) else ast.iter_child_nodes(node)
    return "a coroutine" if isinstance(function, ast.AsyncFunctionDef) else None


def _signature(given: ast.arguments) -> Signature:
    """Returns the signature that `inspect.signature` would. Defaults are shown as written."""
    bare, written = deepcopy(given), dict[str, _Source]()
    for defaults in (bare.defaults, bare.kw_defaults):
        for index, default in enumerate(defaults):
            if default is not None:
                written[name := f"_{len(written)}"] = _Source(default)
                defaults[index] = ast.Name(name)
    for argument in ast.walk(bare):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return signature(eval(f"lambda {ast.unparse(bare)}: 0", dict(written)))


class _Source:
    """A default value that is shown as it is written."""

    def __init__(self, value: ast.expr) -> None:
        self._text = ast.unparse(value)

    def __repr__(self) -> str:
        return self._text

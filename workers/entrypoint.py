"""Loads and calls the training function that the job file names as `entrypoint`."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeAlias, cast

from rayzero.engine.errors import ConfigError, did_you_mean
from rayzero.workers.messages import SCRIPT_ENTRYPOINT

TrainFunction: TypeAlias = Callable[[Any], Any]

_FIX_HINT = "correct `entrypoint:` in the job file"


class EntryPointError(ConfigError):
    """The entry point cannot be called. Its `__cause__`, if any, is an error in the user's code."""


def load_train_function(
    entrypoint: str | bytes, args: dict[str, Any] | None = None
) -> TrainFunction:
    """Resolves an entry point and checks that it can be called with ctx as its only argument.

    Args:
        args: the job's `args`, passed only while no peer waits. The modules that a launched script
            imports are then imported ahead.

    Raises:
        EntryPointError: as for `resolve_entrypoint`; or it takes other arguments.
    """
    function = resolve_entrypoint(entrypoint)
    if entrypoint == SCRIPT_ENTRYPOINT and args is not None:
        function.__globals__["preload"](args)
    check_function(function)
    return function


def call_function(function: TrainFunction, context: Any) -> Any:
    """Calls the training function. A process that the function forks exits where the function ends,
    as a script's would: the generation, its sockets and its shared memory belong to this process.
    """
    process, failed = os.getpid(), True
    try:
        result = function(context)
        failed = False
        return result
    except BaseException:
        if os.getpid() != process:
            traceback.print_exc(file=sys.__stderr__)
        raise
    finally:
        if os.getpid() != process:
            os._exit(int(failed))


def check_function(function: Any) -> None:
    """Raises EntryPointError unless `function` is a plain function that can be called with ctx."""
    if not callable(function):
        raise not_callable_error("the entry point", type(function).__name__)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if inspect.iscoroutinefunction(function):
        raise no_plain_function_error(name, "a coroutine")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise no_plain_function_error(name, "a generator")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # native code has none
        return
    check_signature(name, signature)


def check_signature(name: str, signature: inspect.Signature) -> None:
    """Raises EntryPointError if a function of that signature cannot be called with ctx alone."""
    try:
        signature.bind(None)
    except TypeError as error:
        raise EntryPointError(
            f"the entry point {name}{signature} cannot be called with ctx as its only argument: "
            f"{error}",
            allowed="a function of one argument, ctx; pass further values as `args` (ctx.args)",
            fix=f"change {name}, or {_FIX_HINT}",
        ) from None


def resolve_entrypoint(entrypoint: str | bytes) -> TrainFunction:
    """Imports or unpickles a function.

    Args:
        entrypoint: `module:function`, or a callable pickled by value.

    Raises:
        EntryPointError: the module or function does not exist, is not callable, or raises on
            import; the user's exception is then the cause.
    """
    if isinstance(entrypoint, bytes):
        name, target = "the entry point", _unpickle(entrypoint)
    else:
        name, target = f"entrypoint {entrypoint!r}", _import_object(entrypoint)
    if not callable(target):
        raise not_callable_error(name, type(target).__name__)
    return cast(TrainFunction, target)


def _import_object(entrypoint: str) -> Any:
    module_name, _, path = entrypoint.partition(":")
    target = module = _import_module(entrypoint, module_name)
    for part in path.split("."):
        if not hasattr(target, part):
            place = module.__file__ or module_name
            raise missing_name_error(entrypoint, part, place, list(vars(target)))
        target = getattr(target, part)
    return target


def _import_module(entrypoint: str, module_name: str) -> Any:
    try:
        return import_module(module_name)
    except SystemExit as error:
        raise _exit_error(f"entrypoint {entrypoint!r} cannot be imported", error) from error
    except Exception as error:
        # Only the entry point's module or a parent package: any other missing module is imported by
        # the user's code, and the traceback shows where.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise missing_module_error(entrypoint, missing, os.getcwd()) from None
        raise EntryPointError(
            f"entrypoint {entrypoint!r} cannot be imported: {type(error).__name__}: {error}",
            fix=_FIX_HINT,
        ) from error


def _exit_error(problem: str, error: SystemExit) -> EntryPointError:
    return EntryPointError(
        f"{problem}: it calls sys.exit({error.code!r})",
        allowed="a module that does not parse the command line when it is imported, as argparse's "
        "parse_args does; the job's `args` are in ctx.args",
        fix="write in the module `if __name__ == '__main__':` before what only its command needs; "
        "or run it as a script, by `rayzero launch`",
    )


def not_callable_error(what: str, type_name: str) -> EntryPointError:
    return EntryPointError(
        f"{what} is of type {type_name}, which is not callable",
        allowed="a function of one argument, ctx",
        fix=_FIX_HINT,
    )


def no_plain_function_error(name: str, returned: str) -> EntryPointError:
    return EntryPointError(
        f"the entry point {name} returns {returned} instead of training",
        allowed="a function of one argument, ctx, without async and yield",
        fix=f"change {name}, or {_FIX_HINT}",
    )


def missing_module_error(
    entrypoint: str, missing: str, folder: str, modules: Sequence[str] = ()
) -> EntryPointError:
    near = did_you_mean(missing, list(modules))
    return EntryPointError(
        f"entrypoint {entrypoint!r}: no module named {missing!r}{near}",
        allowed=f"a module that can be imported from {folder}",
        fix=f"{_FIX_HINT}, or run from the folder that holds the module",
    )


def missing_name_error(
    entrypoint: str, missing: str, place: str, names: list[str]
) -> EntryPointError:
    public = [name for name in names if not name.startswith("_")]
    return EntryPointError(
        f"entrypoint {entrypoint!r}: {missing!r} is not in {place}{did_you_mean(missing, public)}",
        allowed="a function of one argument, ctx",
        fix=_FIX_HINT,
    )


def _unpickle(entrypoint: bytes) -> Any:
    try:
        return pickle.loads(entrypoint)
    except SystemExit as error:  # raised by a module that the pickle imports
        raise _exit_error("the entry point cannot be unpickled on the worker", error) from error
    except Exception as error:
        raise EntryPointError(
            f"the entry point cannot be unpickled on the worker: {type(error).__name__}: {error}",
            fix="name a function of a module that workers can import, or 'module:function'",
        ) from error

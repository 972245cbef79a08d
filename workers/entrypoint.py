"""From what the job file calls `entrypoint` to a function that can be called."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias, cast

from rayzero.engine.errors import ConfigError, did_you_mean

TrainFunction: TypeAlias = Callable[[Any], Any]

_FIX_HINT = "`entrypoint:` in the job file"


class EntryPointError(ConfigError):
    """The entry point cannot be called. Its `__cause__`, if any, is the user's own error."""


def load_train_function(entrypoint: str | bytes) -> TrainFunction:
    """As `resolve`, of a function that can be called with ctx alone.

    Raises:
        EntryPointError: as `resolve`; or it takes other arguments.
    """
    found = resolve_entrypoint(entrypoint)
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # native code has none
        return found
    try:
        signature.bind(None)
    except TypeError as error:
        name = getattr(found, "__qualname__", type(found).__qualname__)
        raise EntryPointError(
            f"the entry point {name}{signature} cannot be called with ctx alone: {error}",
            allowed="a function of one argument, ctx; a value of your own comes as ctx.args",
            fix=f"{name}, or {_FIX_HINT}",
        ) from None
    return found


def resolve_entrypoint(entrypoint: str | bytes) -> TrainFunction:
    """The function that `entrypoint` names.

    Args:
        entrypoint: `module:function`, or a callable pickled by value.

    Raises:
        EntryPointError: there is no such module or function, it is not callable, or importing
            the module fails; then the user's error is the cause.
    """
    if isinstance(entrypoint, bytes):
        return _unpickle_function(entrypoint)
    module_name, _, attribute = entrypoint.partition(":")
    module = _import_module(entrypoint, module_name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in vars(found) if not name.startswith("_")]
            raise EntryPointError(
                f"entrypoint {entrypoint!r}: {part!r} is not in "
                f"{module.__file__ or module_name}{did_you_mean(part, names)}",
                allowed="a function of one argument, ctx",
                fix=_FIX_HINT,
            )
        found = getattr(found, part)
    if not callable(found):
        raise EntryPointError(
            f"entrypoint {entrypoint!r} is of type {type(found).__name__}, which is not callable",
            allowed="a function of one argument, ctx",
            fix=_FIX_HINT,
        )
    return cast(TrainFunction, found)


def _import_module(entrypoint: str, module_name: str) -> Any:
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        # The module itself or a parent package of it is missing; any other missing module is an
        # import inside the user's code, and its traceback says where.
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise EntryPointError(
                f"entrypoint {entrypoint!r}: there is no module {error.name!r}",
                allowed=f"a module that can be imported from {os.getcwd()}",
                fix=f"{_FIX_HINT}, or run from the folder that holds the module",
            ) from None
        raise EntryPointError(_import_error_text(entrypoint, error), fix=_FIX_HINT) from error
    except Exception as error:
        raise EntryPointError(_import_error_text(entrypoint, error), fix=_FIX_HINT) from error


def _unpickle_function(entrypoint: bytes) -> TrainFunction:
    try:
        function = pickle.loads(entrypoint)
    except Exception as error:
        raise EntryPointError(
            f"the entry point cannot be unpickled on the worker: {type(error).__name__}: {error}",
            fix="a function of a module the workers can import, or entrypoint='module:function'",
        ) from error
    if not callable(function):
        raise EntryPointError(
            f"the entry point is of type {type(function).__name__}, which is not callable"
        )
    return cast(TrainFunction, function)


def _import_error_text(entrypoint: str, error: Exception) -> str:
    return f"entrypoint {entrypoint!r} does not import: {type(error).__name__}: {error}"

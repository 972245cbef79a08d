"""`resolve`: a DeepSpeed module's name as an object; stand-ins for what rayzero refuses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

from rayzero.deepspeed.names import WORKS
from rayzero.deepspeed.refused_names import REFUSED, REFUSED_PACKAGES
from rayzero.engine.api.alternatives import RefusedNameError
from rayzero.engine.errors import ConfigError, did_you_mean


class _Refusing(type):
    """The type of stand-ins: they can be imported, subclassed and named in `isinstance`, and raise
    ConfigError when they are called."""

    message: str

    def __call__(cls, *args: Any, **options: Any) -> Any:
        raise ConfigError(cls.message)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RefusedNameError(cls.message)


@cache
def stand_in(name: str, use: str) -> type:
    """What a refused name is bound to."""
    message = f"{name} is not part of rayzero; use {use}"
    return _Refusing(name.rpartition(".")[2], (), {"message": message, "__doc__": message})


def is_refused(value: object) -> bool:
    """Whether a name is bound to a stand-in."""
    return isinstance(value, _Refusing)


def package_refusal(module: str) -> str | None:
    """What to use instead of a module of which everything is refused; else None."""
    parts = module.split(".")
    above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((REFUSED_PACKAGES[name] for name in above if name in REFUSED_PACKAGES), None)


@cache
def homes(module: str) -> dict[str, tuple[str, str]]:
    """{name that works in this module: (the module that defines it, its name there)}."""
    found = {}
    for home, names in WORKS.get(module, {}).items():
        for entry in names.split():
            name, _, other = entry.partition("=")
            found[name] = (home, other or name)
    return found


@cache
def refusals(module: str) -> dict[str, str]:
    """{name that is refused in this module: what to use}."""
    return {name: use for use, names in REFUSED.get(module, {}).items() for name in names.split()}


def child_modules(module: str) -> Iterator[str]:
    """The names of the modules directly below this one."""
    prefix = f"{module}." if module else ""
    for name in (*WORKS, *REFUSED_PACKAGES):
        if name.startswith(prefix) and name != module:
            yield name[len(prefix) :].partition(".")[0]


def resolve(module: str, name: str) -> Any:
    """The object that `deepspeed.<module>` calls `name`. Raises AttributeError, which names the
    most similar one, if the table has none."""
    full = ".".join(filter(None, ("deepspeed", module, name)))
    if name in homes(module):
        home, other = homes(module)[name]
        return getattr(import_module(home), other)
    if use := refusals(module).get(name):
        return stand_in(full, use)
    if name.startswith("__"):
        raise AttributeError(name)
    if use := package_refusal(module):
        return stand_in(full, use)
    if name in child_modules(module):
        return import_module(f"rayzero.{full}")
    raise RefusedNameError(missing_message(full, module))


def missing_message(full: str, module: str) -> str:
    """The message for a name that the table does not have."""
    known = sorted({*homes(module), *refusals(module), *child_modules(module)})
    public = [name for name in known if not name.startswith("_")]
    hint = did_you_mean(full.rpartition(".")[2], public)
    return f"rayzero has no {full}{hint or '; available: ' + ', '.join(public)}"

"""`resolve`: a DeepSpeed module's name as an object; stand-ins for what rayzero refuses.

`refused_names.json` has {what to use: {`deepspeed`, or modules below it: names in each of them}}.
Such a name can be imported, and raises ConfigError when it is called. Under `*` it has modules
that, with all below them, have only such names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from rayzero.deepspeed.names import WORKS
from rayzero.engine.api.alternatives import RefusedNameError
from rayzero.engine.errors import ConfigError, did_you_mean

REFUSED: dict[str, dict[str, str]] = {}
"""{module: {name that is refused in it: what to use}}."""
REFUSED_PACKAGES: dict[str, str] = {}
"""{module of which everything is refused: what to use}."""


def _read_refused() -> None:
    table = json.loads(files("rayzero.deepspeed").joinpath("refused_names.json").read_text())
    for use, places in table.items():
        REFUSED_PACKAGES.update(dict.fromkeys(places.pop("*", "").split(), use))
        for modules, names in places.items():
            for module in modules.split():
                below = "" if module == "deepspeed" else module
                REFUSED.setdefault(below, {}).update(dict.fromkeys(names.split(), use))


_read_refused()


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
    """Returns the class that a refused name is bound to."""
    message = f"{name} is not part of rayzero; use {use}"
    return _Refusing(name.rpartition(".")[2], (), {"message": message, "__doc__": message})


def is_refused(value: object) -> bool:
    """Whether a name is bound to a stand-in."""
    return isinstance(value, _Refusing)


def package_refusal(module: str) -> str | None:
    """Returns what to use instead of a module of which everything is refused; else None."""
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
    if use := REFUSED.get(module, {}).get(name):
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
    known = sorted({*homes(module), *REFUSED.get(module, {}), *child_modules(module)})
    public = [name for name in known if not name.startswith("_")]
    hint = did_you_mean(full.rpartition(".")[2], public)
    return f"rayzero has no {full}{hint or '; available: ' + ', '.join(public)}"

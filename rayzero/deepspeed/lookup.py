"""`resolve` returns the object for a name of a DeepSpeed module, or a stand-in for a refused name.

`names.toml` has the names.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from rayzero.engine.config.checks import DEFAULTS
from rayzero.engine.config.model import KEYS, EngineConfig
from rayzero.engine.config.normalize import get_path
from rayzero.engine.errors import ConfigError, did_you_mean

NAMES = tomllib.loads(files("rayzero.deepspeed").joinpath("names.toml").read_text())
"""The tables of `names.toml`."""

MODULES: tuple[str, ...] = tuple(NAMES["modules"].split())
"""Modules below `deepspeed` that are not refused as a whole."""
REFUSED: dict[str, dict[str, str]] = {}
"""{module, "DeepSpeedEngine" or "Accelerator": {name refused there: what to use instead}}."""
REFUSED_PACKAGES: dict[str, str] = {}
"""{module of which everything is refused: what to use instead}."""
_HOMES: dict[str, dict[str, tuple[str, str]]] = {}
"""{module: {name that works in it: (the module that defines the object, its name there)}}."""


def _rows(table: dict[str, dict[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Yields (heading, module, name) of each name in a table."""
    for heading, row in table.items():
        for modules, names in row.items():
            for module in modules.split():
                for name in names.split():
                    yield heading, "" if module == "deepspeed" else module, name


for _home, _module, _name in _rows(NAMES["works"]):
    _name, _, _other = _name.partition("=")
    _HOMES.setdefault(_module, {})[_name] = (_home, _other or _name)
for _use, _module, _name in _rows(NAMES["refused"]):
    if _module == "everything":
        REFUSED_PACKAGES[_name] = _use
    else:
        REFUSED.setdefault(_module, {})[_name] = _use


def _key_constants() -> Iterator[tuple[str, Any]]:
    """Yields, for every key, constants such as `FP16_LOSS_SCALE`, the key, and
    `FP16_LOSS_SCALE_DEFAULT`, its default."""
    for path in (*EngineConfig.model_fields, *KEYS):
        section, _, key = path.rpartition(".")
        own = key.removeprefix(f"{section}_")
        name = own if section in ("", "data_types") else f"{section}.{own}"
        name = name.replace("bf16.", "bfloat16.").replace(".", "_").upper()
        yield name, key
        yield f"{name}_DEFAULT", get_path(DEFAULTS, path)


_of_keys = dict(_key_constants())
CONSTANTS: dict[str, dict[str, Any]] = NAMES["constants"]
"""{module: {name: value}}."""
CONSTANTS[""] = CONSTANTS.pop("deepspeed")
CONSTANTS["runtime.constants"] |= {name: _of_keys[name] for name in NAMES["from_keys"].split()}


class RefusedNameError(ConfigError, AttributeError):
    """A name of DeepSpeed that rayzero refuses; an AttributeError for `hasattr`."""


def refused_attribute(owner: str, kind: str, name: str, known: Iterable[str]) -> RefusedNameError:
    """Returns the error for an attribute that an object does not have; it says what to use instead.

    Args:
        owner: the beginning of the message, which names the object and the attribute.
        kind: the object's heading in `names.toml`.
        known: the object's attributes, of which the message suggests the nearest.
    """
    use = REFUSED[kind].get(name)
    public = [attribute for attribute in known if not attribute.startswith("_")]
    hint = f"; use {use}" if use else did_you_mean(name, public)
    return RefusedNameError(f"{owner}{hint}")


class _Refusing(type):
    """The type of stand-ins, which can be imported, subclassed and used in `isinstance`, and raise
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


def package_refusal(module: str) -> str | None:
    """Returns what to use instead of a module that is refused as a whole; None for any other."""
    parts = module.split(".")
    above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((REFUSED_PACKAGES[name] for name in above if name in REFUSED_PACKAGES), None)


def working_names(module: str) -> list[str]:
    """Returns the names that work in a module."""
    return sorted({*_HOMES.get(module, {}), *CONSTANTS.get(module, {})})


def defined_in(module: str, name: str) -> str | None:
    """Returns the module that defines a name; None if the name does not work, or is a constant."""
    return _HOMES.get(module, {}).get(name, (None,))[0]


def public_names(module: str) -> list[str]:
    """Returns all public names that may be imported from a module."""
    names = {*working_names(module), *REFUSED.get(module, {}), *child_modules(module)}
    return sorted(name for name in names if not name.startswith("_"))


def child_modules(module: str) -> Iterator[str]:
    """Yields the names of the modules directly below this one."""
    prefix = f"{module}." if module else ""
    for name in (*MODULES, *REFUSED_PACKAGES):
        if name.startswith(prefix) and name != module:
            yield name[len(prefix) :].partition(".")[0]


def resolve(module: str, name: str) -> Any:
    """Returns the object that `deepspeed.<module>` calls `name`. Raises AttributeError, which
    suggests the most similar name, if the table does not have it."""
    full = ".".join(filter(None, ("deepspeed", module, name)))
    if name in CONSTANTS.get(module, {}):
        return CONSTANTS[module][name]
    if name in _HOMES.get(module, {}):
        home, name_there = _HOMES[module][name]
        return getattr(import_module(home), name_there)
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
    """Returns the message for a name that the table does not have."""
    names = public_names(module)
    hint = did_you_mean(full.rpartition(".")[2], names)
    return f"rayzero has no {full}{hint or '; available: ' + ', '.join(names)}"

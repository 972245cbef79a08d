"""Which living engine a parameter belongs to: DeepSpeed's functions are given nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from rayzero.engine.engine import Engine
from rayzero.engine.zero.access import Place

_places: WeakKeyDictionary[Engine, Mapping[int, tuple[int, int] | None]] = WeakKeyDictionary()
"""(unit, number in it) by the parameter's id. What leads to an engine would keep it alive here."""


@dataclass(frozen=True)
class Owner:
    """Where a parameter is kept. `place` is None for a frozen one that every rank has whole."""

    engine: Engine
    place: Place | None


def register(engine: Engine) -> None:
    """Makes an engine's parameters known, as long as it lives."""
    places: dict[int, tuple[int, int] | None] = dict.fromkeys(map(id, engine.module.parameters()))
    for number, unit in enumerate(engine._runtime.units):
        for index, param in enumerate(unit.params):
            places[id(param)] = number, index
    _places[engine] = places


def owner_of(param: nn.Parameter) -> Owner | None:
    """The youngest engine that trains this parameter; None if none does."""
    key = id(param)
    for engine, places in reversed(list(_places.items())):
        if key in places:
            place = places[key]
            if place is None:
                return Owner(engine, None)
            number, index = place
            return Owner(engine, Place(engine._runtime.units[number], index))
    return None

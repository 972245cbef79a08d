"""Param -> engine registry, zero.Init, GatheredParameters.

`zero.Init` and `zero.GatheredParameters`.

Which living engine a parameter belongs to: DeepSpeed's functions are given nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rayzero.engine.api.param_access import ParamLocation, write_changed_slices, write_slices
from rayzero.engine.engine import Engine
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.zero.deferred_init import recording, zero_init
from rayzero.engine.zero.parameters import ShardedWeights

_param_locations: WeakKeyDictionary[Engine, Mapping[int, tuple[int, int] | None]] = (
    WeakKeyDictionary()
)
"""(unit, number in it) by the parameter's id. What leads to an engine would keep it alive here."""


@dataclass(frozen=True)
class ParamOwner:
    """Where a parameter is kept. `place` is None for a frozen one that every rank has whole."""

    engine: Engine
    location: ParamLocation | None


def register_params(engine: Engine) -> None:
    """Makes an engine's parameters known, as long as it lives."""
    places: dict[int, tuple[int, int] | None] = dict.fromkeys(map(id, engine.module.parameters()))
    for number, unit in enumerate(engine._runtime.units):
        for index, param in enumerate(unit.params):
            places[id(param)] = number, index
    _param_locations[engine] = places


def find_param_owner(param: nn.Parameter) -> ParamOwner | None:
    """The youngest engine that trains this parameter; None if none does."""
    key = id(param)
    for engine, places in reversed(list(_param_locations.items())):
        if key in places:
            place = places[key]
            if place is None:
                return ParamOwner(engine, None)
            number, index = place
            return ParamOwner(engine, ParamLocation(engine._runtime.units[number], index))
    return None


_GROUP_OPTIONS = (
    "data_parallel_group",
    "mpu",
    "zero_param_parallel_group",
    "sequence_data_parallel_group",
)


class Init:
    """Around a model's construction: it is built without its memory (`rayzero.zero_init`), and
    `initialize` makes it real, unit by unit.

    Args:
        module: a model that is there already; nothing is done to it, `initialize` shards it.
        enabled: without, this does nothing.
        options: DeepSpeed's others. Groups are refused; the rest decides when and in what dtype
            weights are made real, which is the engine's here.
    """

    def __init__(
        self, module: nn.Module | None = None, *, enabled: bool = True, **options: Any
    ) -> None:
        given = [name for name in _GROUP_OPTIONS if options.get(name) is not None]
        if given:
            raise ConfigError(
                f"zero.Init({given[0]}=...) was given",
                allowed="None: all ranks are one data parallel group",
            )
        self._enabled = enabled and module is None
        self._stack = ExitStack()

    def __enter__(self) -> Init:
        if self._enabled:
            self._stack.enter_context(zero_init())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


class GatheredParameters:
    """Within it, parameters are whole on every rank. Collective.

    Args:
        params: a parameter or several, of one engine's model; others are left as they are.
        modifier_rank: that rank's values are every rank's afterwards, and main weights follow. None
            if nothing is changed: changes are lost then where weights are sharded.
        fwd_module: of no use here: a module's forward gathers what is used in it.
        enabled: without, this does nothing.

    Example:
        >>> with GatheredParameters(model.head.weight, modifier_rank=0):
        ...     if torch.distributed.get_rank() == 0:
        ...         torch.nn.init.zeros_(model.head.weight)
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        several = [params] if isinstance(params, nn.Parameter) else list(params)
        unique = {id(param): param for param in several} if enabled else {}
        self._params = list(unique.values())
        self._modifier_rank = modifier_rank
        self._saved: list[tuple[nn.Parameter, ParamOwner, Tensor, Tensor]] = []
        self._stack = ExitStack()

    @torch.no_grad()
    def __enter__(self) -> GatheredParameters:
        planned = [param for param in self._params if find_param_owner(param) is None]
        if planned and self._modifier_rank in (None, 0):
            self._stack.enter_context(recording(planned))
        elif any(param.device.type == "meta" for param in planned):
            raise EngineError(
                f"GatheredParameters(modifier_rank={self._modifier_rank}) before initialize",
                allowed="modifier_rank=0: rank 0's initial values are taken",
            )
        for param in self._params:
            if (owner := find_param_owner(param)) is not None:
                rest = param.data
                if owner.location is not None:
                    param.data = _gather_param(param, owner.location, owner)
                before = param.data.clone() if self._modifier_rank is not None else param.data
                self._saved.append((param, owner, rest, before))
        return self

    @torch.no_grad()
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        for param, owner, rest, before in self._saved:
            if self._modifier_rank is not None and kind is None:
                self._broadcast_modified(param, owner, before)
            param.data = rest
        if self._modifier_rank is not None and kind is None:
            for engine in {owner.engine for _, owner, _, _ in self._saved}:
                if engine._runtime.unshard_scheduler is not None:
                    engine._runtime.unshard_scheduler.invalidate()
        self._saved.clear()

    def _broadcast_modified(self, param: nn.Parameter, owner: ParamOwner, before: Tensor) -> None:
        """The modifier's values to every rank, to model weights and to main weights."""
        value = param.data.contiguous()
        owner.engine._runtime.collectives.broadcast(value, self._modifier_rank or 0)
        if owner.location is None:
            param.data.copy_(value)
            return
        write_slices(owner.location.model_weights(), value)
        main = owner.location.main_weights()
        if main and main[0].memory.dtype is not value.dtype:
            write_changed_slices(main, value, before)
        else:
            write_slices(main, value)


def _gather_param(param: nn.Parameter, place: ParamLocation, owner: ParamOwner) -> Tensor:
    """The whole parameter: where it rests, if that is whole; else new memory."""
    if not isinstance(place.unit.weights, ShardedWeights):
        return param.data
    like = torch.empty(0, dtype=param.dtype, device=owner.engine.device)
    collectives = owner.engine._runtime.collectives
    return place.gather_full(place.model_weights(), collectives, like, scattered=True)

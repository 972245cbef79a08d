"""DeepSpeed's `zero.Init` and `zero.GatheredParameters`, and the lookup of a parameter's engine,
which they and `tensor_fragments` need because they are given parameters only."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rayzero.engine.api.param_access import ParamLocation, write_changed_slices, write_slices
from rayzero.engine.engine import Engine, live_engines
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.zero.deferred_init import recording, zero_init
from rayzero.engine.zero.parameters import ShardedWeights

_ParamIndex = dict[int, tuple[int, int] | None]
"""(unit, position in it) by the parameter's id; None for a frozen one that every rank holds."""

_param_indices: WeakKeyDictionary[Engine, _ParamIndex] = WeakKeyDictionary()
"""No value may refer to an engine: it would keep the engine alive."""


@dataclass(frozen=True)
class ParamOwner:
    """Where a parameter is stored. `location` is None for a frozen one that every rank holds in
    full."""

    engine: Engine
    location: ParamLocation | None


def find_param_owner(param: nn.Parameter) -> ParamOwner | None:
    """The newest engine that has this parameter; None if none does."""
    key = id(param)
    for engine in live_engines():
        index = _param_index(engine)
        if key in index:
            entry = index[key]
            if entry is None:
                return ParamOwner(engine, None)
            unit, position = entry
            return ParamOwner(engine, ParamLocation(engine._runtime.units[unit], position))
    return None


def _param_index(engine: Engine) -> _ParamIndex:
    if engine not in _param_indices:
        index: _ParamIndex = dict.fromkeys(map(id, engine.module.parameters()))
        for number, unit in enumerate(engine._runtime.units):
            for position, param in enumerate(unit.params):
                index[id(param)] = number, position
        _param_indices[engine] = index
    return _param_indices[engine]


_GROUP_OPTIONS = (
    "data_parallel_group",
    "mpu",
    "zero_param_parallel_group",
    "sequence_data_parallel_group",
)


class Init:
    """Around a model's construction: builds it without allocating its memory (`rayzero.zero_init`);
    `initialize` materializes it unit by unit.

    Args:
        module: an existing model; it is left unchanged, and `initialize` shards it.
        enabled: if False, this does nothing.
        options: DeepSpeed's other options. Groups are refused; the rest are ignored, because the
            engine decides when and in which dtype weights are materialized.
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
    """Within it, parameters are gathered in full on every rank. Collective.

    Args:
        params: one or more parameters of one engine's model; others are left as they are.
        modifier_rank: this rank's values are broadcast at the end, to model weights and main
            weights. None if nothing is changed: where weights are sharded, changes would be lost.
        fwd_module: ignored: a module's forward gathers the parameters used in it.
        enabled: if False, this does nothing.

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
        given = [params] if isinstance(params, nn.Parameter) else list(params)
        unique = {id(param): param for param in given} if enabled else {}
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
                original = param.data
                if owner.location is not None:
                    param.data = _gather_param(param, owner.location, owner)
                before = param.data.clone() if self._modifier_rank is not None else param.data
                self._saved.append((param, owner, original, before))
        return self

    @torch.no_grad()
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        for param, owner, original, before in self._saved:
            if self._modifier_rank is not None and kind is None:
                self._broadcast_modified(param, owner, before)
            param.data = original
        if self._modifier_rank is not None and kind is None:
            for engine in {owner.engine for _, owner, _, _ in self._saved}:
                if engine._runtime.unshard_scheduler is not None:
                    engine._runtime.unshard_scheduler.invalidate()
        self._saved.clear()

    def _broadcast_modified(self, param: nn.Parameter, owner: ParamOwner, before: Tensor) -> None:
        """Broadcasts the modifier's values into model weights and main weights."""
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


def _gather_param(param: nn.Parameter, location: ParamLocation, owner: ParamOwner) -> Tensor:
    """The full parameter: its own memory where weights are replicated, otherwise new memory."""
    if not isinstance(location.unit.weights, ShardedWeights):
        return param.data
    like = torch.empty(0, dtype=param.dtype, device=owner.engine.device)
    collectives = owner.engine._runtime.collectives
    return location.gather_full(location.model_weights(), collectives, like, sharded=True)

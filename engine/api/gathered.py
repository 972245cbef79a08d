"""`zero.Init` and `zero.GatheredParameters`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.api.owners import Owner, owner_of
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.zero.access import Place, put, put_changed
from rayzero.engine.zero.deferred import recorded_again, zero_init
from rayzero.engine.zero.weights import ShardedWeights

_GROUPS = (
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
        given = [name for name in _GROUPS if options.get(name) is not None]
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
        self._modifier = modifier_rank
        self._held: list[tuple[nn.Parameter, Owner, Tensor, Tensor]] = []
        self._stack = ExitStack()

    @torch.no_grad()
    def __enter__(self) -> GatheredParameters:
        planned = [param for param in self._params if owner_of(param) is None]
        if planned and self._modifier in (None, 0):
            self._stack.enter_context(recorded_again(planned))
        elif any(param.device.type == "meta" for param in planned):
            raise EngineError(
                f"GatheredParameters(modifier_rank={self._modifier}) before initialize",
                allowed="modifier_rank=0: rank 0's initial values are taken",
            )
        for param in self._params:
            if (owner := owner_of(param)) is not None:
                rest = param.data
                if owner.place is not None:
                    param.data = _gathered(param, owner.place, owner)
                before = param.data.clone() if self._modifier is not None else param.data
                self._held.append((param, owner, rest, before))
        return self

    @torch.no_grad()
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        for param, owner, rest, before in self._held:
            if self._modifier is not None and kind is None:
                self._spread(param, owner, before)
            param.data = rest
        if self._modifier is not None and kind is None:
            for engine in {owner.engine for _, owner, _, _ in self._held}:
                if engine._runtime.gatherer is not None:
                    engine._runtime.gatherer.invalidate()
        self._held.clear()

    def _spread(self, param: nn.Parameter, owner: Owner, before: Tensor) -> None:
        """The modifier's values to every rank, to model weights and to main weights."""
        value = param.data.contiguous()
        owner.engine._runtime.collectives.broadcast(value, self._modifier or 0)
        if owner.place is None:
            param.data.copy_(value)
            return
        put(owner.place.model_weights(), value)
        main = owner.place.main_weights()
        if main and main[0].memory.dtype is not value.dtype:
            put_changed(main, value, before)
        else:
            put(main, value)


def _gathered(param: nn.Parameter, place: Place, owner: Owner) -> Tensor:
    """The whole parameter: where it rests, if that is whole; else new memory."""
    if not isinstance(place.unit.weights, ShardedWeights):
        return param.data
    like = torch.empty(0, dtype=param.dtype, device=owner.engine.device)
    collectives = owner.engine._runtime.collectives
    return place.whole(place.model_weights(), collectives, like, scattered=True)

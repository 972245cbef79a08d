"""DeepSpeed's `zero.Init` and `zero.GatheredParameters`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from rayzero.engine.api.param_access import (
    StoredParam,
    find_owner,
    invalidate_gathered,
    restore_param,
    write_changed_slices,
    write_slices,
)
from rayzero.engine.api.sharded_params import add_param_attributes
from rayzero.engine.comm.process_group import group_size
from rayzero.engine.engine import Engine
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.layout.packed import is_wrapper, scale_tensors
from rayzero.engine.zero.deferred_init import recording, take_initial_values, zero_init
from rayzero.engine.zero.parameters import ShardedWeights
from rayzero.engine.zero.placement import STAGES
from rayzero.engine.zero.recording import is_unmaterialized

_GROUP_OPTIONS = (
    "data_parallel_group",
    "mpu",
    "zero_param_parallel_group",
    "sequence_data_parallel_group",
)


class Init:
    """Context manager around a model's construction, which then allocates no memory for the model
    (`rayzero.zero_init`); `initialize` materializes the model unit by unit.

    Args:
        module: an existing model; it is left unchanged, and `initialize` shards it.
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
            add_param_attributes()
            self._stack.enter_context(zero_init())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


class GatheredParameters:
    """Context manager in which parameters are gathered in full on every rank. Collective.

    Args:
        params: one or more parameters of one engine's model; others are left as they are.
        modifier_rank: this rank's values are broadcast on exit, to model weights and main weights.
            None if nothing is changed: where weights are sharded, changes would be lost.
        fwd_module: ignored: a module's forward gathers the parameters used in it.

    Raises:
        ConfigError, EngineError: on entry, if there is no rank `modifier_rank`: ConfigError if the
            model has an engine, else EngineError.
        EngineError: on exit, with `enable_sanity_checks` in the config, if sharded parameters were
            written to without `modifier_rank`.

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
        self._gathered: list[_GatheredParam] = []
        self._planned: list[nn.Parameter] = []  # of a model of `zero.Init` without an engine
        self._stack = ExitStack()

    @torch.no_grad()
    def __enter__(self) -> GatheredParameters:
        owners = [(param, find_owner(param)) for param in self._params]
        planned = [param for param, owner in owners if owner is None]
        self._planned = [param for param in planned if is_unmaterialized(param)]
        ranks = group_size()
        if self._planned and not 0 <= (self._modifier_rank or 0) < ranks:
            raise EngineError(
                f"GatheredParameters(modifier_rank={self._modifier_rank}) before initialize, on "
                f"{ranks} ranks",
                allowed=f"0 to {ranks - 1}",
                fix="call deepspeed.init_distributed() before, if there are more ranks",
            )
        keep = self._modifier_rank is not None
        found = [(param, *owner) for param, owner in owners if owner]
        for _, engine, _ in found:
            _check_rank(engine, self._modifier_rank or 0)
        self._gathered = [_GatheredParam(*each, keep=keep) for each in found]
        if planned:  # entered last: an error above would leave the recording on
            self._stack.enter_context(recording(planned))
        return self

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self._stack.__exit__(kind, *error)
        modified = self._modifier_rank is not None and kind is None
        checked: list[_GatheredParam] = []
        if kind is None and not modified:
            checked = [gathered for gathered in self._gathered if gathered.is_checked]
        written = [gathered for gathered in checked if gathered.is_written]
        if modified and self._planned and self._modifier_rank:  # rank 0's are the default
            take_initial_values(self._planned, self._modifier_rank)
        for gathered in self._gathered:
            if modified:
                gathered.broadcast(self._modifier_rank or 0)
            gathered.restore()
        if modified:
            for engine in {gathered.engine for gathered in self._gathered}:
                invalidate_gathered(engine)
        self._gathered.clear()
        _check_unwritten(checked, written)


def _check_unwritten(checked: Sequence[_GatheredParam], written: Sequence[_GatheredParam]) -> None:
    """Raises EngineError on all ranks if any rank has written to parameters of `checked`; `written`
    are those that this rank has written to. Collective unless `checked` is empty."""
    for engine in dict.fromkeys(gathered.engine for gathered in checked):
        own = [gathered for gathered in written if gathered.engine is engine]
        collectives = engine.internals.runtime.collectives
        (count,) = collectives.sum_numbers([len(own)], name="sanity check")
        if count:
            raise EngineError(
                f"{count:.0f} parameters were written to inside GatheredParameters without "
                f"modifier_rank, {len(own)} of them on this rank: the ranks' values would differ, "
                "and all are dropped",
                allowed="writes by one rank, whose values the others get",
                fix="call GatheredParameters(..., modifier_rank=0), or set "
                "zero_optimization.enable_sanity_checks: false, which drops such writes silently, "
                "as DeepSpeed does",
            )


def _check_rank(engine: Engine, rank: int) -> None:
    if not 0 <= rank < engine.world_size:
        raise ConfigError(
            f"GatheredParameters(modifier_rank={rank}) on {engine.world_size} ranks",
            allowed=f"0 to {engine.world_size - 1}, or None where nothing is changed",
        )


class _GatheredParam:
    """A parameter that is gathered on every rank: in its own memory where weights are replicated,
    otherwise in new memory. With `keep`, a copy of the values tells `broadcast` later which of them
    were changed."""

    def __init__(
        self, param: nn.Parameter, engine: Engine, stored: StoredParam | None, *, keep: bool
    ) -> None:
        self.param = param
        self.engine = engine
        self.original = param.data
        self._stored = stored
        if stored is not None and isinstance(stored.unit.weights, ShardedWeights):
            param.data = stored.gather_model_weights(param.dtype)
        self._before = param.data.clone() if keep else param.data
        self._version = param.data_ptr(), param._version

    @property
    def is_written(self) -> bool:
        """Whether an operation of torch has written to the parameter since it was gathered."""
        return self._version != (self.param.data_ptr(), self.param._version)

    @property
    def is_checked(self) -> bool:
        """Whether a write without `modifier_rank` is an error: it would be lost, and the config
        enables the check."""
        zero = self.engine.settings.config.zero_optimization
        return zero.enable_sanity_checks and STAGES[zero.stage].shards_weights

    def restore(self) -> None:
        """Points the parameter to the engine's memory again. That may have changed meanwhile: the
        parameter's block may have been gathered or released."""
        if self._stored is None or not restore_param(self.engine, self._stored, self.param):
            self.param.data = self.original

    def broadcast(self, modifier_rank: int) -> None:
        """Broadcasts the modifier's values into model weights and main weights."""
        self.engine.state.before_write_of_constants()  # the parameter may be frozen
        collectives = self.engine.internals.runtime.collectives
        if is_wrapper(self.param):
            for part in scale_tensors(self.param).values():
                collectives.broadcast(part, modifier_rank)
            return
        value = self.param.data.contiguous()
        collectives.broadcast(value, modifier_rank)
        if self._stored is None:
            self.param.data.copy_(value)
            return
        write_slices(self._stored.model_weights(), value)
        main = self._stored.main_weights()
        if main and main[0].memory.dtype is not value.dtype:
            write_changed_slices(main, value, self._before)
        else:
            write_slices(main, value)

"""DeepSpeed's attributes on parameters of a stage-3 model: `param.ds_status` and its relatives.

The attributes are properties of `nn.Parameter`, which look the parameter up in its engine: nothing
is written to a parameter when its block is gathered, so they cost a step nothing. A parameter that
no stage-3 engine has, and that no `zero.Init` built, has no such attribute: `hasattr(param,
"ds_id")` is False.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from rayzero.engine.api.param_access import StoredParam, restore_param, write_slices
from rayzero.engine.engine import Engine, find_engine
from rayzero.engine.errors import EngineError
from rayzero.engine.layout.units import USED_ELSEWHERE
from rayzero.engine.patches import replace
from rayzero.engine.zero.deferred_init import has_recordings, is_recorded
from rayzero.engine.zero.gather_buffers import BlockState
from rayzero.engine.zero.parameters import ShardedWeights
from rayzero.engine.zero.placement import STAGES
from rayzero.engine.zero.shape_only import ShapeOnly
from rayzero.engine.zero.unshard import UnshardScheduler

_ids = count()


class ZeroParamStatus(Enum):
    """Whether a parameter's values are in its memory; with DeepSpeed's numbers."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def is_zero_param(param: object) -> bool:
    """Returns whether a stage-3 engine has this parameter, or `zero.Init` built it."""
    return hasattr(param, "ds_id")


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declares that a weight is read outside its module's forward: the module is then not gathered
    on its own (`rayzero.unshard_min_numel`). Call it before `initialize`."""
    vars(parameter)[USED_ELSEWHERE] = True


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undoes `register_external_parameter`. Call it before `initialize`."""
    vars(parameter).pop(USED_ELSEWHERE, None)


def _is_stage_3(engine: Engine) -> bool:
    """Returns whether the engine's stage is 3, even if it has one rank, which has all weights."""
    return STAGES[engine.settings.config.zero_optimization.stage].shards_weights


def _find(param: nn.Parameter, name: str = "ds_id") -> tuple[Engine | None, StoredParam | None]:
    """Returns the stage-3 engine that has a parameter, and where the engine stores it. The engine
    is None for a model of `zero.Init` that has no engine yet, the place for a frozen parameter that
    every rank holds in full. Raises AttributeError, with the attribute's `name`, for any other
    parameter."""
    found = find_engine(param)
    if found is None and is_recorded(param):
        return None, None
    if found is not None and _is_stage_3(found[0]):
        engine, entry = found
        return engine, None if entry is None else StoredParam(engine, *entry)
    raise AttributeError(f"{name!r}: no stage-3 engine has this parameter")


def _sharded(param: nn.Parameter) -> tuple[Engine, StoredParam] | None:
    engine, stored = _find(param)
    if engine is None or stored is None or not isinstance(stored.unit.weights, ShardedWeights):
        return None
    return engine, stored


def _is_persistent(param: nn.Parameter) -> bool:
    """Returns whether every rank always holds the parameter in full."""
    return _find(param)[0] is not None and _sharded(param) is None


def _status(param: nn.Parameter) -> ZeroParamStatus:
    if _find(param)[0] is None:
        return ZeroParamStatus.NOT_AVAILABLE
    if (found := _sharded(param)) is None:
        return ZeroParamStatus.AVAILABLE
    engine, stored = found
    weights = stored.unit.weights
    scheduler = engine.internals.runtime.unshard_scheduler
    if scheduler.state_of(weights) is BlockState.GATHERING:
        return ZeroParamStatus.INFLIGHT
    if isinstance(weights, ShardedWeights) and weights.is_poisoned(param):
        return ZeroParamStatus.NOT_AVAILABLE
    return ZeroParamStatus.AVAILABLE


def _tensor(param: nn.Parameter) -> Tensor:
    """Returns this rank's elements of the parameter, flat, in the engine's memory. Their number may
    differ from rank to rank: a unit, not a parameter, is cut into equal shards."""
    engine, stored = _find(param)
    if engine is None:
        raise AttributeError("'ds_tensor': the model has no engine yet")
    parts = [] if stored is None else stored.model_weights()
    return parts[0].memory if parts else param.data.new_empty(0)


def _all_gather(
    param: nn.Parameter, param_list: Iterable[nn.Parameter] | None = None, **_: Any
) -> None:
    """Gathers this parameter, or those of `param_list`, until `partition()`. Collective."""
    for each in [param] if param_list is None else param_list:
        found = _sharded(each)
        if found is not None and _status(each) is ZeroParamStatus.NOT_AVAILABLE:
            each.data = found[1].gather_model_weights(each.dtype)


def _partition(
    param: nn.Parameter,
    param_list: Iterable[nn.Parameter] | None = None,
    *,
    has_been_updated: bool = False,
    **_: Any,
) -> None:
    """Ends `all_gather`. With `has_been_updated`, each rank writes its part of the values that it
    sees to the model weights and main weights."""
    for each in [param] if param_list is None else param_list:
        if (found := _sharded(each)) is not None:
            engine, stored = found
            if has_been_updated:
                engine.state.before_write_of_constants()
                write_slices(stored.model_weights(), each.data)
                write_slices(stored.main_weights(), each.data)
            restore_param(engine, stored, each)


def _keeping_values(param: nn.Parameter, *args: Any, **options: Any) -> Tensor:
    """Calls `Tensor.to`, but does not move a parameter that has values to the meta device while a
    model of `zero.Init` waits there for its engine. PEFT moves each adapter to the device of the
    adapted weight, and the adapter's values would be lost."""
    moved = Tensor.to(param, *args, **options)
    if moved.is_meta and not param.is_meta and has_recordings():
        return Tensor.to(param, moved.dtype)
    return moved


def add_param_attributes() -> None:
    """Gives `nn.Parameter` the attributes that DeepSpeed's parameters have. Safe to repeat."""
    if "ds_id" in vars(nn.Parameter):
        return
    replace(nn.Parameter, "to", _keeping_values)
    getters: dict[str, Callable[[Any], Any]] = {
        "ds_id": lambda param: vars(param).setdefault("_ds_id", next(_ids)),
        "ds_shape": lambda param: param.shape,
        "ds_numel": lambda param: param.numel(),
        "ds_status": _status,
        "ds_tensor": _tensor,
        "ds_persist": _is_persistent,
        "ds_active_sub_modules": lambda param: set(),  # blocks, not modules, keep weights gathered
        "all_gather": lambda param: partial(_all_gather, param),
        "partition": lambda param: partial(_partition, param),
        "partition_numel": lambda param: _tensor(param).numel,
    }
    for name, getter in getters.items():
        replace(nn.Parameter, name, _attribute(name, getter))


def _attribute(name: str, getter: Callable[[nn.Parameter], Any]) -> property:
    """Returns a property that an ordinary parameter does not have: reading it there raises
    AttributeError."""

    def get(param: nn.Parameter) -> Any:
        _find(param, name)
        return getter(param)

    return property(get)


class ParameterOffload:
    """`optimizer.parameter_offload` at stage 3, for code that gathers a whole model, removes the
    hooks that gather blocks, generates, and registers them again (TRL).

    Attributes:
        module: the model.
        forward_hooks: one handle; removing it pauses the gathering of blocks.
        backward_hooks: none.
    """

    def __init__(self, module: nn.Module, scheduler: UnshardScheduler) -> None:
        self.module = module
        self._scheduler = scheduler
        self.forward_hooks: list[ParameterOffload] = [self]
        self.backward_hooks: list[Any] = []

    def remove(self) -> None:
        """Stops the gathering of blocks until `_register_deepspeed_module`. Meanwhile weights have
        values only within `GatheredParameters(model.parameters())`."""
        self._scheduler.paused = True

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Resumes the gathering of blocks."""
        self._scheduler.paused = False
        self.forward_hooks = [self]


def add_stage3_names(engine: Engine) -> None:
    """Gives a stage-3 engine's model, parameters and optimizer DeepSpeed's attributes, and makes
    the model's state dictionary refuse the use of weights that are not gathered."""
    if not _is_stage_3(engine):
        return
    add_param_attributes()
    _refuse_absent_values(engine.module)
    vars(engine.module)["ds_external_parameters"] = list  # there are none
    if engine.optimizer is not None:
        scheduler = engine.internals.runtime.unshard_scheduler
        vars(engine.optimizer)["parameter_offload"] = ParameterOffload(engine.module, scheduler)


@contextmanager
def OnDevice(  # noqa: N802 -- DeepSpeed's name
    dtype: torch.dtype | None = None, device: str = "meta", enabled: bool = True
) -> Iterator[None]:
    """Makes the tensors of a model that is constructed in this context on `device`, floating-point
    tensors in `dtype`. On the "meta" device they have no values, which `zero.Init` would keep."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


class AbsentValue(ShapeOnly):
    """A weight in `model.state_dict()` at stage 3 that is not gathered: only its shape and dtype.

    `state_dict()` may be called on one rank, so it cannot gather, which is collective. Scripts can
    read a weight's shape and dtype; any use of its values raises EngineError.
    """

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AbsentValue({tuple(self.shape)}, {self.dtype})"

    def read(self) -> NoReturn:
        raise EngineError(
            "a weight of model.state_dict() was used, and at stage 3 each rank holds a part of it",
            allowed="its shape and dtype; its values inside zero.GatheredParameters",
            fix="call engine.state_dict() on all ranks; save_pretrained(state_dict=...) takes it",
        )

    write = read


def _refuse_absent_values(model: nn.Module) -> None:
    """Makes `model.state_dict()` return an `AbsentValue` for a weight that is not gathered, and
    `load_state_dict()` raise EngineError. `state_dict(keep_vars=True)` still returns parameters."""
    for module in model.modules():
        if module._parameters and _replace_absent not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(_replace_absent)
            module.register_load_state_dict_pre_hook(_refuse_load)


def _replace_absent(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, param in module._parameters.items():
        value = state.get(prefix + name)
        if param is None or not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            continue
        if _is_absent(param):
            state[prefix + name] = value.as_subclass(AbsentValue)


def _refuse_load(
    module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    if metadata.get("assign_to_params_buffers"):  # new parameters take the place of these
        return
    for name, param in module._parameters.items():
        if param is not None and prefix + name in state and _is_absent(param):
            raise EngineError(
                f"model.load_state_dict() was called with {prefix + name!r}, and at stage 3 each "
                "rank holds a part of that weight",
                allowed="inside zero.GatheredParameters(model.parameters(), modifier_rank=0), or "
                "before initialize",
                fix="call engine.load_module_state_dict(state) on all ranks",
            )


def _is_absent(param: nn.Parameter) -> bool:
    available = ZeroParamStatus.AVAILABLE
    return getattr(param, "ds_status", available) is not available

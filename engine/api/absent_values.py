"""`model.state_dict()` and `model.load_state_dict()` at stage 3 where a weight is not gathered.

There is no value to return, and gathering is collective, which a call on one rank is not. So the
dictionary has names, shapes and dtypes, which scripts read, and tensors that refuse all else. To
load values is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from rayzero.engine.api.sharded_params import ZeroParamStatus
from rayzero.engine.engine import Engine
from rayzero.engine.errors import EngineError
from rayzero.engine.zero.placement import STAGES
from rayzero.engine.zero.shape_only import ShapeOnly


class AbsentValue(ShapeOnly):
    """A weight's shape and dtype. Raises EngineError where its values are used."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AbsentValue({tuple(self.shape)}, {self.dtype})"

    def read(self) -> NoReturn:
        raise EngineError(
            "a weight of model.state_dict() was used, and at stage 3 each rank holds a part of it",
            allowed="its shape and dtype; its values inside zero.GatheredParameters",
            fix="engine.state_dict() on all ranks, or save_pretrained(state_dict=...) of that",
        )

    write = read


def refuse_absent_values(engine: Engine) -> None:
    """Registers it for every module of a stage-3 engine's model. Without effect on gathered weights
    and on the parameters of `keep_vars=True`."""
    if not STAGES[engine.settings.config.zero_optimization.stage].shards_weights:
        return
    for module in engine.module.modules():
        if module._parameters and _replace not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(_replace)
            module.register_load_state_dict_pre_hook(_refuse_load)


def _replace(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, param in module._parameters.items():
        value = state.get(prefix + name)
        if param is None or not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            continue
        if _is_absent(param):
            state[prefix + name] = value.as_subclass(AbsentValue)


def _refuse_load(
    module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    if metadata.get("assign_to_params_buffers"):  # replaces the parameters
        return
    for name, param in module._parameters.items():
        if param is not None and prefix + name in state and _is_absent(param):
            raise EngineError(
                f"model.load_state_dict() was called with {prefix + name!r}, and at stage 3 each "
                "rank holds a part of that weight",
                allowed="inside zero.GatheredParameters(model.parameters(), modifier_rank=0), or "
                "before initialize",
                fix="engine.load_module_state_dict(state) on all ranks",
            )


def _is_absent(param: nn.Parameter) -> bool:
    available = ZeroParamStatus.AVAILABLE
    return getattr(param, "ds_status", available) is not available

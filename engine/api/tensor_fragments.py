"""DeepSpeed's `safe_get_full_fp32_param` and its relatives: a parameter's state, at any stage.

The `full` functions are collective where the state is sharded: every rank calls them for the same
parameters in the same order. The `local` ones return this rank's part, flat, without copying.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rayzero.engine.api.param_access import ParamLocation, ParamSlice, write_slices
from rayzero.engine.api.params import ParamOwner, find_param_owner
from rayzero.engine.engine import Engine
from rayzero.engine.errors import EngineError
from rayzero.engine.zero.placement import Placement


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """A copy of the main weights, in the dtype of the update; None if no engine trains it."""
    owner = _find_trained(param)
    if owner is None:
        return None
    engine, location = owner
    return _gather_whole(engine, location, location.main_weights(), location.unit.main_weights)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets main weights and model weights; `value` is the same on every rank."""
    engine, location = _require_trained(param, value)
    write_slices(location.main_weights(), value)
    write_slices(location.model_weights(), value)
    if engine._runtime.unshard_scheduler is not None:
        engine._runtime.unshard_scheduler.invalidate()


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of the averaged gradient, between the last `backward` of a step and `step`, as
    the optimizer uses it except for clipping; None before the first `backward`, or if frozen.

    Raises:
        EngineError: in the middle of a step, when gradients are not reduced yet.
    """
    owner = _find_trained(param)
    if owner is None or not owner[0]._step.tracker.has_gradients:
        return None
    engine, location = owner
    grad = _gather_whole(
        engine, location, _grad_slices(engine, location), location.unit.main_weights
    )
    return grad.mul_(_grad_scale(engine))


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets the gradient that `step` is about to use; `value` is the same on every rank.

    Raises:
        EngineError: as `safe_get_full_grad`, and before `backward`.
    """
    engine, location = _require_trained(param, value)
    write_slices(_grad_slices(engine, location), value / _grad_scale(engine))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A copy of a tensor of optimizer state, such as `exp_avg`; None before the first step."""
    owner = _find_trained(param)
    if owner is None:
        return None
    engine, location = owner
    parts = _optimizer_state_slices(engine, location, optim_state_key)
    exists = torch.tensor(float(bool(parts)), dtype=torch.float64, device=engine.device)
    engine._runtime.collectives.all_reduce_scalars(exists)
    if not exists:
        return None
    return _gather_whole(
        engine, location, parts, parts[0].memory if parts else location.unit.main_weights
    )


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Sets a tensor of optimizer state; nothing before the first step, which makes it."""
    engine, location = _require_trained(param, value)
    write_slices(_optimizer_state_slices(engine, location, optim_state_key), value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the main weights, flat; not a copy."""
    owner = _find_trained(param)
    return _join_slices(owner[1].main_weights()) if owner else None


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of this rank's part of the averaged gradient, flat. As `safe_get_full_grad`."""
    owner = _find_trained(param)
    if owner is None or not owner[0]._step.tracker.has_gradients:
        return None
    own = _join_slices(_grad_slices(*owner))
    return own * _grad_scale(owner[0]) if own is not None else None


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of a tensor of optimizer state, flat."""
    owner = _find_trained(param)
    return _join_slices(_optimizer_state_slices(*owner, optim_state_key)) if owner else None


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets this rank's part of the main weights; model weights follow with the next step."""
    _copy_into(safe_get_local_fp32_param(param), value)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets this rank's part of the gradient that `step` is about to use."""
    owner = _find_trained(param)
    if owner is not None:
        _copy_into(_join_slices(_grad_slices(*owner)), value / _grad_scale(owner[0]))


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Sets this rank's part of a tensor of optimizer state."""
    _copy_into(safe_get_local_optimizer_state(param, optim_state_key), value)


def _find_trained(param: nn.Parameter) -> tuple[Engine, ParamLocation] | None:
    owner: ParamOwner | None = find_param_owner(param)
    if owner is None or owner.location is None or owner.location.unit.main_weights is None:
        return None
    return owner.engine, owner.location


def _require_trained(param: nn.Parameter, value: Tensor) -> tuple[Engine, ParamLocation]:
    owner = _find_trained(param)
    if owner is None:
        raise EngineError(
            f"a parameter of shape {tuple(param.shape)} is not trained by any engine",
            allowed="a parameter of the model given to initialize that requires gradients",
        )
    if value.shape != owner[1].shape:
        raise EngineError(
            f"a value of shape {tuple(value.shape)} was given for a parameter of shape "
            f"{owner[1].shape}",
            allowed="the full parameter's shape",
        )
    return owner


@torch.no_grad()
def _gather_whole(
    engine: Engine, location: ParamLocation, parts: Sequence[ParamSlice], like: Tensor | None
) -> Tensor:
    """The full tensor on the engine's device, from any memory."""
    dtype = like.dtype if like is not None else torch.float32
    sharded = engine._runtime.stage.optimizer_state is Placement.SHARDED
    model = torch.empty(0, dtype=dtype, device=engine.device)
    return location.gather_full(parts, engine._runtime.collectives, model, sharded=sharded)


def _grad_slices(engine: Engine, location: ParamLocation) -> list[ParamSlice]:
    if not engine._step.tracker.step_pending or not engine._step.is_boundary:
        raise EngineError(
            "a gradient was requested before it was reduced over the ranks",
            allowed="between the last backward() of a step and step()",
        )
    engine._runtime.reducer.wait()
    return location.gradients()


def _optimizer_state_slices(engine: Engine, location: ParamLocation, key: str) -> list[ParamSlice]:
    optimizer = engine._step.optimizer
    return location.optimizer_state(optimizer.shards, optimizer.torch_optimizer.state, key)


def _grad_scale(engine: Engine) -> float:
    return engine.settings.post_reduce_scale / engine.loss_scale


def _join_slices(parts: Sequence[ParamSlice]) -> Tensor | None:
    """None if this rank has no part of it."""
    if not parts:
        return None
    return parts[0].memory if len(parts) == 1 else torch.cat([part.memory for part in parts])


@torch.no_grad()
def _copy_into(own: Tensor | None, value: Tensor) -> None:
    if own is not None:
        own.copy_(value.reshape(-1))

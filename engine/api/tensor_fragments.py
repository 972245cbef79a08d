"""DeepSpeed's `safe_get_full_fp32_param` and its relatives: a parameter's state, at any stage.

The `full` functions are collective where the state is sharded: every rank calls them for the same
parameters in the same order. The `local` functions read and write this rank's part, flat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from rayzero.engine.api.param_access import (
    ParamSlice,
    StoredParam,
    find_owner,
    invalidate_gathered,
    write_slices,
)
from rayzero.engine.errors import ConfigError, EngineError


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Returns a copy of the main weights, in the dtype of the update; None if no engine trains the
    parameter."""
    stored = _find_trained(param)
    return None if stored is None else stored.gather_state(stored.main_weights())


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets main weights and model weights; `value` is the same on every rank."""
    stored = _require_trained(param, value)
    write_slices(stored.main_weights(), value)
    write_slices(stored.model_weights(), value)
    invalidate_gathered(stored.engine)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Returns a copy of the averaged gradient; None before the first `backward` of a step, or if
    the parameter is frozen.

    Between the last `backward` of a step and `step`, this is the gradient that the optimizer uses,
    before clipping. Earlier in a step, and in `no_sync`, it is what the micro-steps have added up
    so far: at stages 0 and 1 this rank's own gradient, scaled as if every rank had the same.
    """
    stored = _find_with_gradient(param)
    if stored is None:
        return None
    local = stored.local_gradient()
    if local is not None:
        return local
    return stored.gather_state(stored.gradients()).mul_(stored.grad_scale)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets the gradient that `step` is about to use; `value` is the same on every rank. Raises
    EngineError while the gradient is not reduced: before the first `backward` of a step, and at
    stages 0 and 1 before the last."""
    stored = _require_trained(param, value)
    write_slices(stored.gradients(), value / stored.grad_scale)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Sets each gradient that `step` is about to use to `update_func(gradient, param)`, whose
    result is the same on every rank; frozen parameters are left out."""
    for param in param_list:
        if (grad := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Returns a copy of a tensor of optimizer state, such as `exp_avg`; None before the first step.
    Raises ConfigError if the optimizer's state has no tensor of that name."""
    stored = _find_trained(param)
    if stored is None:
        return None
    parts = stored.optimizer_state(optim_state_key)
    collectives = stored.engine.internals.runtime.collectives
    (holders,) = collectives.sum_numbers([float(bool(parts))])
    if holders:
        return stored.gather_state(parts)
    _check_state_key(stored, optim_state_key)
    return None


def _check_state_key(stored: StoredParam, key: str) -> None:
    optimizer = stored.engine.internals.optimizer
    known = {name for shard in optimizer.shards for name in optimizer.state_tensors(shard)}
    if known and key not in known:
        raise ConfigError(
            f"the state of {type(optimizer.torch_optimizer).__name__} has no tensor {key!r}",
            allowed=", ".join(sorted(known)),
        )


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Sets a tensor of optimizer state; does nothing before the first step, which creates the
    state. Raises ConfigError as `safe_get_full_optimizer_state` does."""
    stored = _require_trained(param, value)
    _check_state_key(stored, optim_state_key)
    write_slices(stored.optimizer_state(optim_state_key), value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Returns this rank's part of the main weights, flat; not a copy. None if no engine trains the
    parameter, or this rank has no part of it."""
    stored = _find_trained(param)
    return _join_slices(stored.main_weights()) if stored else None


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Returns a copy of this rank's part of the averaged gradient, flat; None before the first
    `backward` of a step, or if this rank has no part of it. Raises EngineError while the gradient
    is not reduced: at stages 0 and 1 before the last `backward` of a step."""
    stored = _find_with_gradient(param)
    own = _join_slices(stored.gradients()) if stored else None
    return None if stored is None or own is None else own * stored.grad_scale


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Returns this rank's part of a tensor of optimizer state, flat; not a copy. Raises ConfigError
    as `safe_get_full_optimizer_state` does."""
    stored = _find_trained(param)
    if stored is None:
        return None
    _check_state_key(stored, optim_state_key)
    return _join_slices(stored.optimizer_state(optim_state_key))


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets this rank's part of the main weights; model weights follow with the next step."""
    _copy_into(safe_get_local_fp32_param(param), value)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets this rank's part of the gradient that `step` is about to use."""
    if (stored := _find_trained(param)) is not None:
        _copy_into(_join_slices(stored.gradients()), value / stored.grad_scale)


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Sets this rank's part of a tensor of optimizer state."""
    _copy_into(safe_get_local_optimizer_state(param, optim_state_key), value)


def _find_trained(param: nn.Parameter) -> StoredParam | None:
    _, stored = find_owner(param) or (None, None)
    return stored if stored is not None and stored.unit.main_weights is not None else None


def _find_with_gradient(param: nn.Parameter) -> StoredParam | None:
    stored = _find_trained(param)
    return stored if stored and stored.engine.internals.tracker.has_gradients else None


def _require_trained(param: nn.Parameter, value: Tensor) -> StoredParam:
    stored = _find_trained(param)
    if stored is None:
        raise EngineError(
            f"a parameter of shape {tuple(param.shape)} is not trained by any engine",
            allowed="a parameter of the model given to initialize that requires gradients",
        )
    if value.shape != stored.shape:
        raise EngineError(
            f"a value of shape {tuple(value.shape)} was given for a parameter of shape "
            f"{stored.shape}",
            allowed="the full parameter's shape",
        )
    return stored


def _join_slices(parts: Sequence[ParamSlice]) -> Tensor | None:
    """Returns the parts as one flat tensor, without a copy if there is one part; None if there is
    none."""
    if not parts:
        return None
    return parts[0].memory if len(parts) == 1 else torch.cat([part.memory for part in parts])


@torch.no_grad()
def _copy_into(own: Tensor | None, value: Tensor) -> None:
    if own is not None:
        own.copy_(value.reshape(-1))

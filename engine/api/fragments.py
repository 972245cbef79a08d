"""`safe_get_full_fp32_param` and its relatives: a parameter's state, whole, under any stage.

The `full` ones are collective where the state is sharded: every rank calls them for the same
parameters in the same order. The `local` ones are this rank's part, flat, without copying.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rayzero.engine.api.owners import Owner, owner_of
from rayzero.engine.engine import Engine
from rayzero.engine.errors import EngineError
from rayzero.engine.zero.access import Part, Place, put
from rayzero.engine.zero.placement import Placement


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """A copy of the main weights, in the dtype of the update; None if no engine trains it."""
    owner = _trained(param)
    if owner is None:
        return None
    engine, place = owner
    return _whole(engine, place, place.main_weights(), place.unit.main)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets main weights and model weights; `value` is the same on every rank."""
    engine, place = _known(param, value)
    put(place.main_weights(), value)
    put(place.model_weights(), value)
    if engine._runtime.gatherer is not None:
        engine._runtime.gatherer.invalidate()


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of the averaged gradient, between the last `backward` of a step and `step`, as
    the optimizer uses it but for clipping; None before the first `backward`, or if it is frozen.

    Raises:
        EngineError: in the middle of a step, where ranks have not summed yet.
    """
    owner = _trained(param)
    if owner is None or not owner[0]._accumulated:
        return None
    engine, place = owner
    whole = _whole(engine, place, _gradients(engine, place), place.unit.main)
    return whole.mul_(_factor(engine))


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets the gradient that `step` is about to use; `value` is the same on every rank.

    Raises:
        EngineError: as `safe_get_full_grad`, and before `backward`.
    """
    engine, place = _known(param, value)
    put(_gradients(engine, place), value / _factor(engine))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A copy of a tensor of optimizer state, such as `exp_avg`; None before the first step."""
    owner = _trained(param)
    if owner is None:
        return None
    engine, place = owner
    parts = _state(engine, place, optim_state_key)
    found = torch.tensor(float(bool(parts)), dtype=torch.float64, device=engine.device)
    engine._runtime.collectives.vote(found)
    if not found:
        return None
    return _whole(engine, place, parts, parts[0].memory if parts else place.unit.main)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Sets a tensor of optimizer state; nothing before the first step, which makes it."""
    engine, place = _known(param, value)
    put(_state(engine, place, optim_state_key), value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the main weights, flat; not a copy."""
    owner = _trained(param)
    return _only(owner[1].main_weights()) if owner else None


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of this rank's part of the averaged gradient, flat. As `safe_get_full_grad`."""
    owner = _trained(param)
    if owner is None or not owner[0]._accumulated:
        return None
    own = _only(_gradients(*owner))
    return own * _factor(owner[0]) if own is not None else None


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of a tensor of optimizer state, flat."""
    owner = _trained(param)
    return _only(_state(*owner, optim_state_key)) if owner else None


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets this rank's part of the main weights; model weights follow with the next step."""
    _set(safe_get_local_fp32_param(param), value)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets this rank's part of the gradient that `step` is about to use."""
    owner = _trained(param)
    if owner is not None:
        _set(_only(_gradients(*owner)), value / _factor(owner[0]))


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Sets this rank's part of a tensor of optimizer state."""
    _set(safe_get_local_optimizer_state(param, optim_state_key), value)


def _trained(param: nn.Parameter) -> tuple[Engine, Place] | None:
    owner: Owner | None = owner_of(param)
    if owner is None or owner.place is None or owner.place.unit.main is None:
        return None
    return owner.engine, owner.place


def _known(param: nn.Parameter, value: Tensor) -> tuple[Engine, Place]:
    owner = _trained(param)
    if owner is None:
        raise EngineError(
            f"a parameter of shape {tuple(param.shape)} is not trained by any engine",
            allowed="a parameter of the model given to initialize that requires gradients",
        )
    if value.shape != owner[1].shape:
        raise EngineError(
            f"a value of shape {tuple(value.shape)} was given for a parameter of shape "
            f"{owner[1].shape}",
            allowed="the whole parameter's shape",
        )
    return owner


@torch.no_grad()
def _whole(engine: Engine, place: Place, parts: Sequence[Part], like: Tensor | None) -> Tensor:
    """On the engine's device, from wherever it rests."""
    dtype = like.dtype if like is not None else torch.float32
    scattered = engine._runtime.stage.optimizer_state is Placement.SHARDED
    model = torch.empty(0, dtype=dtype, device=engine.device)
    return place.whole(parts, engine._runtime.collectives, model, scattered=scattered)


def _gradients(engine: Engine, place: Place) -> list[Part]:
    if not engine._awaiting_step or not engine.is_gradient_accumulation_boundary():
        raise EngineError(
            "a gradient was asked for while there is no sum of it",
            allowed="between the last backward() of a step and step()",
        )
    engine._runtime.reducer.wait()
    return place.gradients()


def _state(engine: Engine, place: Place, key: str) -> list[Part]:
    optimizer = engine._optimizer
    return place.optimizer_state(optimizer.runs, optimizer.torch.state, key)


def _factor(engine: Engine) -> float:
    return engine.settings.factor / engine.loss_scale


def _only(parts: Sequence[Part]) -> Tensor | None:
    """None where this rank has nothing of it."""
    if not parts:
        return None
    return parts[0].memory if len(parts) == 1 else torch.cat([part.memory for part in parts])


@torch.no_grad()
def _set(own: Tensor | None, value: Tensor) -> None:
    if own is not None:
        own.copy_(value.reshape(-1))

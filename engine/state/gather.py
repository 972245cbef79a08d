"""The whole model on one rank, from wherever its ranges lie, a unit at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.unit import Unit
from rayzero.engine.zero.weights import ShardedWeights, views_of


@torch.no_grad()
def full_state_dict(model: nn.Module, runtime: ZeroRuntime) -> dict[str, Tensor]:
    """The model's state dict in CPU memory on rank 0, empty on the others. Collective.

    Names, tied entries and dtypes are those of `model.state_dict()`. No more than one unit is
    whole on the model's device at a time.
    """
    whole: dict[int, Tensor] = {}  # by the parameter's identity: tied entries stay one tensor
    target = runtime.collectives.rank == 0
    for unit in runtime.units:
        values = _whole_unit(unit, runtime)
        if target and values is not None:
            whole |= {id(p): v for p, v in zip(unit.params, values, strict=True)}
    if not target:
        return {}
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            value = whole.setdefault(id(tensor), tensor.detach())
            state[name] = _to_host(value, whole, id(tensor))
    return state


def _whole_unit(unit: Unit, runtime: ZeroRuntime) -> list[Tensor] | None:
    """The unit's parameters in CPU memory, on rank 0."""
    collectives = runtime.collectives
    if not isinstance(unit.weights, ShardedWeights):
        return None
    shard = unit.weights.shard.to(unit.weights.device)  # it may rest in host memory
    numel = unit.layout.numel if collectives.rank == 0 else 0
    full = shard.new_empty(numel)
    collectives.gather(full, shard).wait()
    return views_of(unit.layout, full.cpu()) if numel else None


def _to_host(value: Tensor, whole: dict[int, Tensor], key: int) -> Tensor:
    """A copy of our own in CPU memory, the same one for every entry of a tied tensor."""
    copied = whole.get(-key)
    if copied is None:
        copied = whole[-key] = value.to("cpu", copy=True)
    return copied

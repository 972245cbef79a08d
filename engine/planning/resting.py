"""What a rank holds between two steps, from the layout alone: the classes of `engine.memory`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rayzero.engine.layout.units import UnitPlan
from rayzero.engine.precision.policy import Precision
from rayzero.engine.zero.placement import Placement, Stage


@dataclass(frozen=True)
class Shape:
    """What decides where a model's bytes lie.

    Attributes:
        stage: its row on the world at hand.
        state_itemsize: bytes of optimizer state for each element of main weights.
        grad_slots: how many units of gradients pass through at once, where they rest sharded.
        weight_slots: how many blocks of weights are gathered at once, where they rest sharded.
    """

    stage: Stage
    precision: Precision
    state_itemsize: float
    grad_slots: int
    weight_slots: int


def resting_bytes(plans: Sequence[UnitPlan], shape: Shape) -> dict[str, int]:
    """Bytes of one rank by class: model_weights, main_weights, main_grads, optimizer_state, slots.

    `staging` of gloo is not in it: NCCL has none.
    """
    found: defaultdict[str, int] = defaultdict(int)
    for plan in plans:
        layout, original = plan.layout, plan.params[0].dtype
        rows = {Placement.SHARDED: layout.shard_numel}
        model = shape.precision.model_dtype(original)
        found["model_weights"] += rows.get(shape.stage.model_weights, layout.numel) * model.itemsize
        if not plan.trainable:
            continue
        owned = rows.get(shape.stage.optimizer_state, layout.numel)
        main = shape.precision.main_dtype(original)
        if main is not model:
            found["main_weights"] += owned * main.itemsize
        found["main_grads"] += rows.get(shape.stage.main_grads, layout.numel) * main.itemsize
        found["optimizer_state"] += round(owned * shape.state_itemsize)
    found["slots"] = _grad_slots(plans, shape) + _weight_slots(plans, shape)
    return dict(found)


def _grad_slots(plans: Sequence[UnitPlan], shape: Shape) -> int:
    trainable = [plan for plan in plans if plan.trainable]
    if shape.stage.main_grads is not Placement.SHARDED or not trainable:
        return 0
    dtypes = [shape.precision.main_dtype(plan.params[0].dtype) for plan in trainable]
    count = min(shape.grad_slots, len(trainable))
    longest = max(plan.layout.numel for plan in trainable)
    return count * longest * max(one.itemsize for one in dtypes)


def _weight_slots(plans: Sequence[UnitPlan], shape: Shape) -> int:
    """A ring of slots as long as the longest block, and one for each block around another."""
    blocks: defaultdict[nn.Module, int] = defaultdict(int)
    if shape.stage.model_weights is not Placement.SHARDED:
        return 0
    for plan in plans:
        if plan.block is not None:
            dtype = shape.precision.model_dtype(plan.params[0].dtype)
            blocks[plan.block] += plan.layout.numel * dtype.itemsize
    around = [
        one for one in blocks if any(sub in blocks for sub in one.modules() if sub is not one)
    ]
    ring = sorted((size for one, size in blocks.items() if one not in around), reverse=True)
    turns = min(shape.weight_slots, len(ring))
    return sum(blocks[one] for one in around) + turns * (ring[0] if ring else 0)


def state_itemsize(make: object, dtype: torch.dtype) -> float:
    """Bytes of optimizer state for each element, as seen on a small parameter.

    Args:
        make: makes the torch optimizer of a list of parameter groups.
    """
    if not callable(make):
        raise TypeError("a function of parameter groups is needed")
    param = nn.Parameter(torch.zeros(8, 8, dtype=dtype))
    optimizer = make([{"params": [param]}])
    param.grad = torch.zeros_like(param)
    optimizer.step()
    state = optimizer.state[param].values()
    large = [one for one in state if isinstance(one, torch.Tensor) and one.ndim]
    return sum(one.nbytes for one in large) / param.numel()

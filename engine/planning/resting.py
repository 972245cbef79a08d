"""What a rank holds between two steps, from the layout alone: the classes of `engine.memory`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from rayzero.engine.config.zero import ZeroConfig
from rayzero.engine.layout.units import UnitPlan
from rayzero.engine.offload.plan import moves
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
        offload: the config's section, for `offload_optimizer` and `offload_param`.
    """

    stage: Stage
    precision: Precision
    state_itemsize: float
    grad_slots: int
    weight_slots: int
    offload: ZeroConfig


@dataclass
class Resting:
    """Bytes of one rank by class, in each memory."""

    device: Counter[str] = field(default_factory=Counter)
    host: Counter[str] = field(default_factory=Counter)
    disk: Counter[str] = field(default_factory=Counter)


def resting_bytes(plans: Sequence[UnitPlan], shape: Shape) -> Resting:
    """model_weights, main_weights, main_grads, optimizer_state and slots of one rank.

    For a device with memory of its own. `staging` of gloo is not in it: NCCL has none.
    """
    found = Resting()
    asked = shape.offload.offload_optimizer
    share = 0.0 if asked.device == "none" else asked.ratio
    for plan, moved in zip(plans, moves(plans, share), strict=True):
        _weights(plan, shape, found)
        if plan.trainable:
            _trained(plan, shape, found, moved)
    found.device["slots"] += _grad_slots(plans, shape) + _weight_slots(plans, shape)
    return found


def _weights(plan: UnitPlan, shape: Shape, found: Resting) -> None:
    sharded = shape.stage.model_weights is Placement.SHARDED
    numel = plan.layout.shard_numel if sharded else plan.layout.numel
    where = found.host if shape.offload.offload_param.device == "cpu" else found.device
    where["model_weights"] += numel * shape.precision.model_dtype(plan.params[0].dtype).itemsize


def _trained(plan: UnitPlan, shape: Shape, found: Resting, moved: bool) -> None:
    """Main weights, main grads and optimizer state."""
    layout, original = plan.layout, plan.params[0].dtype
    shards = shape.stage.optimizer_state is Placement.SHARDED
    owned = layout.shard_numel if shards else layout.numel
    main = shape.precision.main_dtype(original)
    grad = shape.precision.grad_dtype(original)
    rest = found.device
    if moved:
        rest = found.disk if shape.offload.offload_optimizer.device == "nvme" else found.host
    weights_on_host = shape.offload.offload_param.device == "cpu"
    together = weights_on_host == (rest is found.host) and rest is not found.disk
    if main is not shape.precision.model_dtype(original) or not together:
        rest["main_weights"] += owned * main.itemsize
    rest["optimizer_state"] += round(owned * shape.state_itemsize)
    if moved:
        found.host["main_grads"] += owned * grad.itemsize
    if shape.stage.main_grads is not Placement.SHARDED:
        found.device["main_grads"] += layout.numel * grad.itemsize
    elif not moved:
        found.device["main_grads"] += layout.shard_numel * grad.itemsize


def _grad_slots(plans: Sequence[UnitPlan], shape: Shape) -> int:
    trainable = [plan for plan in plans if plan.trainable]
    if shape.stage.main_grads is not Placement.SHARDED or not trainable:
        return 0
    dtypes = [shape.precision.grad_dtype(plan.params[0].dtype) for plan in trainable]
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

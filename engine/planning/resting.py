"""What a rank holds between two steps, from the layout alone: the classes of `engine.memory`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rayzero.engine.config import OptimizerConfig
from rayzero.engine.config.zero import ZeroConfig
from rayzero.engine.layout.units import UnitPlan
from rayzero.engine.offload.plan import moves, piece_numel
from rayzero.engine.optim.build import maker
from rayzero.engine.precision.policy import Precision
from rayzero.engine.zero.placement import Placement, Stage


@dataclass(frozen=True)
class Shape:
    """What decides where a model's bytes lie.

    Attributes:
        stage: its row on the world at hand.
        state_itemsizes: bytes of optimizer state for each element of main weights, by parameter
            group.
        grad_slots: how many units of gradients pass through at once, where they rest sharded.
        weight_slots: how many blocks of weights are gathered at once, where they rest sharded.
        offload: the config's section, for `offload_optimizer` and `offload_param`.
    """

    stage: Stage
    precision: Precision
    state_itemsizes: Sequence[float]
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
    found.host["staging"] += _disk_buffers(plans, shape)
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
    owned = _owned(plan, shape)
    main = shape.precision.main_dtype(original)
    grad = shape.precision.grad_dtype(original)
    rest = found.device
    if moved:
        rest = found.disk if shape.offload.offload_optimizer.device == "nvme" else found.host
    weights_on_host = shape.offload.offload_param.device == "cpu"
    together = weights_on_host == (rest is found.host) and rest is not found.disk
    together |= rest is found.disk and not _main_item(plan, shape)
    if main is not shape.precision.model_dtype(original) or not together:
        rest["main_weights"] += owned * main.itemsize
    rest["optimizer_state"] += _state(plan, owned, shape)
    if grad is not main:  # what the optimizer is given, as long as its step
        if moved:
            found.host["grad_copies"] = max(found.host["grad_copies"], owned * main.itemsize)
        else:
            found.device["grad_copies"] += owned * main.itemsize
    if moved:
        found.host["main_grads"] += owned * grad.itemsize
    if shape.stage.main_grads is not Placement.SHARDED:
        found.device["main_grads"] += layout.numel * grad.itemsize
    elif not moved:
        found.device["main_grads"] += layout.shard_numel * grad.itemsize


def _state(plan: UnitPlan, owned: int, shape: Shape) -> int:
    """Of the rank that has most of it: groups may lie apart."""
    if not shape.state_itemsizes:
        return 0
    starts = range(0, plan.layout.numel, owned)
    return max(_state_from(plan, slice(start, start + owned), shape) for start in starts)


def _state_from(plan: UnitPlan, within: slice, shape: Shape) -> int:
    found = 0.0
    for group, part in plan.layout.runs(within):
        found += (part.stop - part.start) * shape.state_itemsizes[group]
    return round(found)


def _disk_buffers(plans: Sequence[UnitPlan], shape: Shape) -> int:
    """What pieces on their way from a file and back lie in."""
    asked = shape.offload.offload_optimizer
    if asked.device != "nvme":
        return 0
    most = piece_numel(shape.offload)
    pieces = longest = 0
    item = 0.0
    for plan, moved in zip(plans, moves(plans, asked.ratio), strict=True):
        if moved:
            owned = _owned(plan, shape)
            pieces += -(-owned // most)
            longest = max(longest, min(owned, most))
            item = max(item, _main_item(plan, shape) + max(shape.state_itemsizes, default=0.0))
    return round(min(asked.buffer_count, pieces) * longest * item)


def _main_item(plan: UnitPlan, shape: Shape) -> int:
    """Bytes of a main weight in a file: none, where it is a model weight in host memory."""
    original = plan.params[0].dtype
    main = shape.precision.main_dtype(original)
    native = main is shape.precision.model_dtype(original)
    return 0 if native and shape.offload.offload_param.device == "cpu" else main.itemsize


def _owned(plan: UnitPlan, shape: Shape) -> int:
    """Elements that this rank updates."""
    shards = shape.stage.optimizer_state is Placement.SHARDED
    return plan.layout.shard_numel if shards else plan.layout.numel


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


def state_itemsizes(
    config: OptimizerConfig | None, groups: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Bytes of optimizer state for each element of every group, as seen on small parameters.

    Args:
        config: whose optimizer; without one there is no state.
        groups: the options of each group.
    """
    if config is None:
        return []
    params = [nn.Parameter(torch.zeros(8, 8)) for _ in groups]
    optimizer = maker(config)(
        [{**group, "params": [one]} for group, one in zip(groups, params, strict=True)]
    )
    for one in params:
        one.grad = torch.zeros_like(one)
    optimizer.step()
    return [
        sum(
            value.nbytes
            for value in optimizer.state[one].values()
            if isinstance(value, torch.Tensor) and value.ndim
        )
        / one.numel()
        for one in params
    ]

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
from rayzero.engine.offload.plan import select_offloaded, update_chunk_numel
from rayzero.engine.optim.build import optimizer_factory
from rayzero.engine.precision.policy import Precision
from rayzero.engine.zero.placement import Placement, Stage


@dataclass(frozen=True)
class MemoryInputs:
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
    num_grad_buffers: int
    num_gather_buffers: int
    offload: ZeroConfig


@dataclass
class PersistentBytes:
    """Bytes of one rank by class, in each memory."""

    device: Counter[str] = field(default_factory=Counter)
    host: Counter[str] = field(default_factory=Counter)
    disk: Counter[str] = field(default_factory=Counter)


def persistent_bytes(plans: Sequence[UnitPlan], shape: MemoryInputs) -> PersistentBytes:
    """model_weights, main_weights, main_grads, optimizer_state and slots of one rank.

    For a device with memory of its own. `staging` of gloo is not in it: NCCL has none.
    """
    found = PersistentBytes()
    asked = shape.offload.offload_optimizer
    share = 0.0 if asked.device == "none" else asked.ratio
    for plan, moved in zip(plans, select_offloaded(plans, share), strict=True):
        _add_weights(plan, shape, found)
        if plan.trainable:
            _add_trained_state(plan, shape, found, moved)
    found.host["staging"] += _nvme_buffer_bytes(plans, shape)
    found.device["slots"] += _grad_buffer_bytes(plans, shape) + _gather_buffer_bytes(plans, shape)
    return found


def _add_weights(plan: UnitPlan, shape: MemoryInputs, found: PersistentBytes) -> None:
    sharded = shape.stage.model_weights is Placement.SHARDED
    numel = plan.layout.shard_numel if sharded else plan.layout.numel
    where = found.host if shape.offload.offload_param.device == "cpu" else found.device
    where["model_weights"] += numel * shape.precision.model_dtype(plan.params[0].dtype).itemsize


def _add_trained_state(
    plan: UnitPlan, shape: MemoryInputs, found: PersistentBytes, moved: bool
) -> None:
    """Main weights, main grads and optimizer state."""
    layout, original = plan.layout, plan.params[0].dtype
    owned = _owned_numel(plan, shape)
    main = shape.precision.main_dtype(original)
    grad = shape.precision.grad_dtype(original)
    rest = found.device
    if moved:
        rest = found.disk if shape.offload.offload_optimizer.device == "nvme" else found.host
    weights_on_host = shape.offload.offload_param.device == "cpu"
    together = weights_on_host == (rest is found.host) and rest is not found.disk
    together |= rest is found.disk and not _main_itemsize(plan, shape)
    if main is not shape.precision.model_dtype(original) or not together:
        rest["main_weights"] += owned * main.itemsize
    rest["optimizer_state"] += _max_state_bytes(plan, owned, shape)
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


def _max_state_bytes(plan: UnitPlan, owned: int, shape: MemoryInputs) -> int:
    """Of the rank that has most of it: groups may lie apart."""
    if not shape.state_itemsizes:
        return 0
    starts = range(0, plan.layout.numel, owned)
    return max(_state_bytes_in(plan, slice(start, start + owned), shape) for start in starts)


def _state_bytes_in(plan: UnitPlan, within: slice, shape: MemoryInputs) -> int:
    found = 0.0
    for group, part in plan.layout.group_ranges(within):
        found += (part.stop - part.start) * shape.state_itemsizes[group]
    return round(found)


def _nvme_buffer_bytes(plans: Sequence[UnitPlan], shape: MemoryInputs) -> int:
    """What pieces on their way from a file and back lie in."""
    asked = shape.offload.offload_optimizer
    if asked.device != "nvme":
        return 0
    most = update_chunk_numel(shape.offload)
    pieces = longest = 0
    item = 0.0
    for plan, moved in zip(plans, select_offloaded(plans, asked.ratio), strict=True):
        if moved:
            owned = _owned_numel(plan, shape)
            pieces += -(-owned // most)
            longest = max(longest, min(owned, most))
            item = max(item, _main_itemsize(plan, shape) + max(shape.state_itemsizes, default=0.0))
    return round(min(asked.buffer_count, pieces) * longest * item)


def _main_itemsize(plan: UnitPlan, shape: MemoryInputs) -> int:
    """Bytes of a main weight in a file: none, where it is a model weight in host memory."""
    original = plan.params[0].dtype
    main = shape.precision.main_dtype(original)
    native = main is shape.precision.model_dtype(original)
    return 0 if native and shape.offload.offload_param.device == "cpu" else main.itemsize


def _owned_numel(plan: UnitPlan, shape: MemoryInputs) -> int:
    """Elements that this rank updates."""
    shards = shape.stage.optimizer_state is Placement.SHARDED
    return plan.layout.shard_numel if shards else plan.layout.numel


def _grad_buffer_bytes(plans: Sequence[UnitPlan], shape: MemoryInputs) -> int:
    trainable = [plan for plan in plans if plan.trainable]
    if shape.stage.main_grads is not Placement.SHARDED or not trainable:
        return 0
    dtypes = [shape.precision.grad_dtype(plan.params[0].dtype) for plan in trainable]
    count = min(shape.num_grad_buffers, len(trainable))
    longest = max(plan.layout.numel for plan in trainable)
    return count * longest * max(one.itemsize for one in dtypes)


def _gather_buffer_bytes(plans: Sequence[UnitPlan], shape: MemoryInputs) -> int:
    """A ring of slots as long as the longest block, and one for each block around another."""
    blocks: defaultdict[nn.Module, int] = defaultdict(int)
    if shape.stage.model_weights is not Placement.SHARDED:
        return 0
    for plan in plans:
        if plan.module is not None:
            dtype = shape.precision.model_dtype(plan.params[0].dtype)
            blocks[plan.module] += plan.layout.numel * dtype.itemsize
    around = [
        one for one in blocks if any(sub in blocks for sub in one.modules() if sub is not one)
    ]
    ring = sorted((size for one, size in blocks.items() if one not in around), reverse=True)
    turns = min(shape.num_gather_buffers, len(ring))
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
    optimizer = optimizer_factory(config)(
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

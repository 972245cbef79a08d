"""Bytes that a rank holds between two steps, computed from the layout, in the classes of
`engine.accounting`. The tests compare them with those of real engines.
"""

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
    """Settings that decide the size and memory kind of a model's tensors.

    Attributes:
        stage: resolved for the world size.
        state_itemsizes: bytes of optimizer state for each element of main weights, by parameter
            group.
        num_grad_buffers: units of gradients reduced concurrently, where gradients are sharded.
        num_gather_buffers: blocks gathered at the same time, where weights are sharded.
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
    """Bytes of one rank by class and memory kind."""

    device: Counter[str] = field(default_factory=Counter)
    host: Counter[str] = field(default_factory=Counter)
    disk: Counter[str] = field(default_factory=Counter)


def persistent_bytes(plans: Sequence[UnitPlan], shape: MemoryInputs) -> PersistentBytes:
    """model_weights, main_weights, main_grads, optimizer_state and slots of one rank.

    For a device with separate memory. gloo's `staging` is not included: NCCL has none.
    """
    sizes = PersistentBytes()
    asked = shape.offload.offload_optimizer
    share = 0.0 if asked.device == "none" else asked.ratio
    for plan, moved in zip(plans, select_offloaded(plans, share), strict=True):
        _add_weights(plan, shape, sizes)
        if plan.trainable:
            _add_trained_state(plan, shape, sizes, moved)
    sizes.host["staging"] += _nvme_buffer_bytes(plans, shape)
    sizes.device["slots"] += _grad_buffer_bytes(plans, shape) + _gather_buffer_bytes(plans, shape)
    return sizes


def _add_weights(plan: UnitPlan, shape: MemoryInputs, sizes: PersistentBytes) -> None:
    sharded = shape.stage.model_weights is Placement.SHARDED
    numel = plan.layout.shard_numel if sharded else plan.layout.numel
    where = sizes.host if shape.offload.offload_param.device == "cpu" else sizes.device
    where["model_weights"] += numel * shape.precision.model_dtype(plan.params[0].dtype).itemsize


def _add_trained_state(
    plan: UnitPlan, shape: MemoryInputs, sizes: PersistentBytes, moved: bool
) -> None:
    """Main weights, main grads and optimizer state."""
    layout, original = plan.layout, plan.params[0].dtype
    owned = _owned_numel(plan, shape)
    main = shape.precision.main_dtype(original)
    grad = shape.precision.grad_dtype(original)
    store = sizes.device
    if moved:
        store = sizes.disk if shape.offload.offload_optimizer.device == "nvme" else sizes.host
    weights_on_host = shape.offload.offload_param.device == "cpu"
    together = weights_on_host == (store is sizes.host) and store is not sizes.disk
    together |= store is sizes.disk and not _main_itemsize(plan, shape)
    if main is not shape.precision.model_dtype(original) or not together:
        store["main_weights"] += owned * main.itemsize
    store["optimizer_state"] += _max_state_bytes(plan, owned, shape)
    if grad is not main:  # gradients in the main dtype, for the time of the optimizer step
        if moved:
            sizes.host["grad_copies"] = max(sizes.host["grad_copies"], owned * main.itemsize)
        else:
            sizes.device["grad_copies"] += owned * main.itemsize
    if moved:
        sizes.host["main_grads"] += owned * grad.itemsize
    if shape.stage.main_grads is not Placement.SHARDED:
        sizes.device["main_grads"] += layout.numel * grad.itemsize
    elif not moved:
        sizes.device["main_grads"] += layout.shard_numel * grad.itemsize


def _max_state_bytes(plan: UnitPlan, owned: int, shape: MemoryInputs) -> int:
    """The maximum over ranks: parameter groups may be unevenly distributed."""
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
    """Buffers of update chunks that are read from and written to files."""
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
    """Bytes of a main weight in a file; 0 where it is a model weight in host memory."""
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
    """A ring of buffers of the largest block's size, and one per block that contains others."""
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
    """Bytes of optimizer state per element of every group, measured on small parameters.

    Args:
        config: the optimizer section; None: no state.
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

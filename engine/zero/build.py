"""Makes units out of plans: the one place where stage, precision and layout meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.layout.units import UnitPlan
from rayzero.engine.offload.plan import Offload
from rayzero.engine.offload.stores import StateStore
from rayzero.engine.precision.policy import Precision
from rayzero.engine.zero.deferred_init import Materializer, ScratchBuffer
from rayzero.engine.zero.gather_buffers import Block
from rayzero.engine.zero.gradients import (
    GradBufferPool,
    GradStore,
    HostPartialGrads,
    HostShardedGrads,
    PartialGrads,
    ShardedGrads,
)
from rayzero.engine.zero.parameters import (
    HostShardedWeights,
    ReplicatedWeights,
    ShardedWeights,
    WeightStore,
    param_views,
    set_param_data,
)
from rayzero.engine.zero.placement import Placement, Stage
from rayzero.engine.zero.reducer import GradReduction, Reducer
from rayzero.engine.zero.unit import Unit


@dataclass(frozen=True)
class BuildContext:
    """What every unit of a run has in common.

    Attributes:
        restoring: a state is loaded right afterwards, so that initial values do not matter.
    """

    stage: Stage
    precision: Precision
    collectives: Collectives
    device: torch.device
    materializer: Materializer
    scratch: ScratchBuffer
    offload: Offload
    restoring: bool = False


def make_grad_buffers(
    plans: Sequence[UnitPlan], recipe: BuildContext, count: int
) -> GradBufferPool | None:
    """What gradients pass through on their way into shards; None when they rest whole."""
    trainable = [plan for plan in plans if plan.trainable]
    if recipe.stage.main_grads is not Placement.SHARDED or not trainable:
        return None
    # One dtype for all: the widest of the grad dtypes, into which the others convert exactly.
    dtypes = [recipe.precision.grad_dtype(plan.params[0].dtype) for plan in trainable]
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    numel = max(plan.layout.numel for plan in trainable)
    zeros, device = recipe.collectives.zeros, recipe.device
    return GradBufferPool(lambda: zeros(numel, widest, device), count)


def make_units(
    plans: Sequence[UnitPlan], recipe: BuildContext, slots: GradBufferPool | None
) -> list[Unit]:
    """All units, one after another."""
    homes = recipe.offload.state_stores(plans)
    return [make_unit(plan, recipe, slots, home) for plan, home in zip(plans, homes, strict=True)]


def make_unit(
    plan: UnitPlan, recipe: BuildContext, slots: GradBufferPool | None, home: StateStore
) -> Unit:
    """Builds one unit from rank 0's values. No more than this unit is whole meanwhile.

    The model's own tensors are let go here: afterwards its parameters are views of ours.
    """
    stage, layout = recipe.stage, plan.layout
    original = _flatten_unit(plan, recipe)
    shard = layout.shard(recipe.collectives.rank)
    sharded_update = stage.optimizer_state is Placement.SHARDED
    owned = shard if sharded_update else slice(0, layout.numel)
    model_dtype = recipe.precision.model_dtype(original.dtype)
    weights: WeightStore
    if stage.model_weights is Placement.SHARDED:
        weights = _make_sharded_weights(plan, original[shard], model_dtype, recipe)
    elif original.dtype is model_dtype:
        weights = ReplicatedWeights(layout, plan.params, original)
    else:
        weights = ReplicatedWeights(
            layout, plan.params, _copy_to_comm_buffer(original, model_dtype, recipe)
        )
    main, grads = None, None
    if plan.trainable:
        main = home.main_weights(original[owned], weights.owned_range(owned))
        grads = _make_grad_store(plan, recipe, owned, main, slots, home)
    return Unit(layout, plan.params, weights, main, grads, owned, shard, plan.module, home)


def _make_sharded_weights(
    plan: UnitPlan, values: Tensor, dtype: torch.dtype, recipe: BuildContext
) -> ShardedWeights:
    if recipe.offload.shard_gather is not None:
        resting = recipe.offload.transfer.host_zeros(values.numel(), dtype).copy_(values)
        return HostShardedWeights(plan.layout, plan.params, resting, recipe.offload.shard_gather)
    return ShardedWeights(plan.layout, plan.params, _copy_to_comm_buffer(values, dtype, recipe))


def _flatten_unit(plan: UnitPlan, recipe: BuildContext) -> Tensor:
    """The unit's initial values in one buffer, rank 0's on every rank; zeros between them.

    Zeros only, when the values come from elsewhere.
    """
    dtype = plan.params[0].dtype
    if recipe.stage.model_weights is Placement.SHARDED:  # only a shard of it will stay
        flat = recipe.scratch.flat(plan.layout.numel, dtype).zero_()
    else:
        flat = recipe.collectives.zeros(plan.layout.numel, dtype, recipe.device)
    if recipe.restoring:
        return flat
    for view, param in zip(param_views(plan.layout, flat), plan.params, strict=True):
        view.copy_(recipe.materializer.initial_value(param))
    recipe.collectives.broadcast(flat)
    return flat


def _copy_to_comm_buffer(values: Tensor, dtype: torch.dtype, recipe: BuildContext) -> Tensor:
    """A copy in a buffer that collectives may be called on."""
    return recipe.collectives.zeros(values.numel(), dtype, recipe.device).copy_(values)


def _make_grad_store(
    plan: UnitPlan,
    recipe: BuildContext,
    owned: slice,
    main: Tensor,
    slots: GradBufferPool | None,
    home: StateStore,
) -> GradStore:
    dtype = recipe.precision.grad_dtype(plan.params[0].dtype)
    link, how = home.grad_transfer, recipe.stage.gradient_collective
    if slots is not None and link is not None:
        return HostShardedGrads(plan.layout, link.host_zeros(main.numel(), dtype), slots, link)
    if slots is not None:
        resting = torch.zeros(main.numel(), dtype=dtype, device=recipe.device)
        return ShardedGrads(plan.layout, resting, slots)
    flat = recipe.collectives.zeros(plan.layout.numel, dtype, recipe.device)
    if link is not None:
        host = link.host_zeros(main.numel(), dtype)
        return HostPartialGrads(plan.layout, flat, owned, how, host, link)
    return PartialGrads(plan.layout, flat, owned, how)


def place_ungrouped(
    model: nn.Module, in_units: set[nn.Parameter], recipe: BuildContext
) -> list[Tensor]:
    """Brings what is in no unit to its device and dtype, with rank 0's values: frozen parameters
    whose weights are replicated, and buffers. Returns the parameters' tensors.
    """
    loose = []
    for param in model.parameters():
        if param not in in_units:
            value = _replicate(param, recipe)
            set_param_data(param, value)
            loose.append(value)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            kept = name not in module._non_persistent_buffers_set
            module._buffers[name] = _replicate(buffer, recipe, loaded=kept)
    return loose


def _replicate(tensor: Tensor, recipe: BuildContext, *, loaded: bool = True) -> Tensor:
    """Rank 0's value on every rank, in memory that is contiguous, as broadcasts need it.

    Any value, when a state that holds it is `loaded` right afterwards.
    """
    dtype = recipe.precision.model_dtype(tensor.dtype)
    if recipe.restoring and loaded and tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=dtype, device=recipe.device)
    value = recipe.materializer.initial_value(tensor).to(recipe.device, dtype).contiguous()
    if not (recipe.restoring and loaded):
        recipe.collectives.broadcast(value)
    return value


def make_reducer(
    units: Sequence[Unit], way: GradReduction, slots: GradBufferPool | None, *, overlap: bool
) -> Reducer:
    """What sums the gradients of trainable units, in their order."""
    stores = [
        (unit.grads, len(unit.params), way.reduce_op(unit))
        for unit in units
        if unit.grads is not None
    ]
    return Reducer(stores, slots, overlap=overlap)


def make_blocks(units: Sequence[Unit]) -> list[Block]:
    """The blocks whose weights come and go, each with all of its units; none when all stay."""
    blocks: dict[int, Block] = {}
    for unit in units:
        if unit.module is None or not isinstance(unit.weights, ShardedWeights):
            continue
        key = id(unit.module)
        if key in blocks:
            blocks[key].units = (*blocks[key].units, unit.weights)
        else:
            blocks[key] = Block(unit.name, unit.module, (unit.weights,))
    return list(blocks.values())

"""Makes units out of plans: the one place where stage, precision and layout meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.layout.units import UnitPlan
from rayzero.engine.offload.grads import FetchedPartialGrads, FetchedShardedGrads
from rayzero.engine.offload.home import Home
from rayzero.engine.offload.plan import Offload
from rayzero.engine.offload.weights import HostWeights
from rayzero.engine.precision.policy import Precision
from rayzero.engine.zero.deferred import Materializer, Scratch
from rayzero.engine.zero.grads import GradSlots, GradStore, PartialGrads, ShardedGrads
from rayzero.engine.zero.placement import Placement, Stage
from rayzero.engine.zero.reducer import Reducer
from rayzero.engine.zero.slots import Block
from rayzero.engine.zero.unit import Unit
from rayzero.engine.zero.ways import GradientWay
from rayzero.engine.zero.weights import (
    ResidentWeights,
    ShardedWeights,
    WeightStore,
    adopt,
    views_of,
)


@dataclass(frozen=True)
class Recipe:
    """What every unit of a run has in common.

    Attributes:
        restoring: a state is loaded right afterwards, so that initial values do not matter.
    """

    stage: Stage
    precision: Precision
    collectives: Collectives
    device: torch.device
    values: Materializer
    scratch: Scratch
    offload: Offload
    restoring: bool = False


def make_slots(plans: Sequence[UnitPlan], recipe: Recipe, count: int) -> GradSlots | None:
    """What gradients pass through on their way into shards; None when they rest whole."""
    trainable = [plan for plan in plans if plan.trainable]
    if recipe.stage.main_grads is not Placement.SHARDED or not trainable:
        return None
    # One dtype for all: the widest of the grad dtypes, into which the others convert exactly.
    dtypes = [recipe.precision.grad_dtype(plan.params[0].dtype) for plan in trainable]
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    numel = max(plan.layout.numel for plan in trainable)
    zeros, device = recipe.collectives.zeros, recipe.device
    return GradSlots(lambda: zeros(numel, widest, device), count)


def make_units(plans: Sequence[UnitPlan], recipe: Recipe, slots: GradSlots | None) -> list[Unit]:
    """All units, one after another."""
    homes = recipe.offload.homes(plans)
    return [make_unit(plan, recipe, slots, home) for plan, home in zip(plans, homes, strict=True)]


def make_unit(plan: UnitPlan, recipe: Recipe, slots: GradSlots | None, home: Home) -> Unit:
    """Builds one unit from rank 0's values. No more than this unit is whole meanwhile.

    The model's own tensors are let go here: afterwards its parameters are views of ours.
    """
    stage, layout = recipe.stage, plan.layout
    original = _flattened(plan, recipe)
    shard = layout.shard(recipe.collectives.rank)
    sharded_update = stage.optimizer_state is Placement.SHARDED
    owned = shard if sharded_update else slice(0, layout.numel)
    model_dtype = recipe.precision.model_dtype(original.dtype)
    weights: WeightStore
    if stage.model_weights is Placement.SHARDED:
        weights = _sharded(plan, original[shard], model_dtype, recipe)
    elif original.dtype is model_dtype:
        weights = ResidentWeights(layout, plan.params, original)
    else:
        weights = ResidentWeights(layout, plan.params, _shared(original, model_dtype, recipe))
    main, grads = None, None
    if plan.trainable:
        main = home.main_weights(original[owned], weights.part(owned))
        grads = _make_grads(plan, recipe, owned, main, slots, home)
    return Unit(layout, plan.params, weights, main, grads, owned, shard, plan.block, home)


def _sharded(plan: UnitPlan, values: Tensor, dtype: torch.dtype, recipe: Recipe) -> ShardedWeights:
    if recipe.offload.path is not None:
        resting = recipe.offload.link.host(values.numel(), dtype).copy_(values)
        return HostWeights(plan.layout, plan.params, resting, recipe.offload.path)
    return ShardedWeights(plan.layout, plan.params, _shared(values, dtype, recipe))


def _flattened(plan: UnitPlan, recipe: Recipe) -> Tensor:
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
    for view, param in zip(views_of(plan.layout, flat), plan.params, strict=True):
        view.copy_(recipe.values.value(param))
    recipe.collectives.broadcast(flat)
    return flat


def _shared(values: Tensor, dtype: torch.dtype, recipe: Recipe) -> Tensor:
    """A copy in a buffer that collectives may be called on."""
    return recipe.collectives.zeros(values.numel(), dtype, recipe.device).copy_(values)


def _make_grads(
    plan: UnitPlan,
    recipe: Recipe,
    owned: slice,
    main: Tensor,
    slots: GradSlots | None,
    home: Home,
) -> GradStore:
    dtype = recipe.precision.grad_dtype(plan.params[0].dtype)
    link, how = home.fetches, recipe.stage.gradient_collective
    if slots is not None and link is not None:
        return FetchedShardedGrads(plan.layout, link.host(main.numel(), dtype), slots, link)
    if slots is not None:
        resting = torch.zeros(main.numel(), dtype=dtype, device=recipe.device)
        return ShardedGrads(plan.layout, resting, slots)
    flat = recipe.collectives.zeros(plan.layout.numel, dtype, recipe.device)
    if link is not None:
        host = link.host(main.numel(), dtype)
        return FetchedPartialGrads(plan.layout, flat, owned, how, host, link)
    return PartialGrads(plan.layout, flat, owned, how)


def place_loose(model: nn.Module, in_units: set[nn.Parameter], recipe: Recipe) -> list[Tensor]:
    """Brings what is in no unit to its device and dtype, with rank 0's values: frozen parameters
    whose weights are replicated, and buffers. Returns the parameters' tensors.
    """
    loose = []
    for param in model.parameters():
        if param not in in_units:
            value = _everywhere(param, recipe)
            adopt(param, value)
            loose.append(value)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            kept = name not in module._non_persistent_buffers_set
            module._buffers[name] = _everywhere(buffer, recipe, loaded=kept)
    return loose


def _everywhere(tensor: Tensor, recipe: Recipe, *, loaded: bool = True) -> Tensor:
    """Rank 0's value on every rank, in memory that is contiguous, as broadcasts need it.

    Any value, when a state that holds it is `loaded` right afterwards.
    """
    dtype = recipe.precision.model_dtype(tensor.dtype)
    if recipe.restoring and loaded and tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=dtype, device=recipe.device)
    value = recipe.values.value(tensor).to(recipe.device, dtype).contiguous()
    if not (recipe.restoring and loaded):
        recipe.collectives.broadcast(value)
    return value


def make_reducer(
    units: Sequence[Unit], way: GradientWay, slots: GradSlots | None, *, overlap: bool
) -> Reducer:
    """What sums the gradients of trainable units, in their order."""
    stores = [
        (unit.grads, len(unit.params), way.sums(unit)) for unit in units if unit.grads is not None
    ]
    return Reducer(stores, slots, overlap=overlap)


def make_blocks(units: Sequence[Unit]) -> list[Block]:
    """The blocks whose weights come and go, each with all of its units; none when all stay."""
    blocks: dict[int, Block] = {}
    for unit in units:
        if unit.block is None or not isinstance(unit.weights, ShardedWeights):
            continue
        key = id(unit.block)
        if key in blocks:
            blocks[key].units = (*blocks[key].units, unit.weights)
        else:
            blocks[key] = Block(unit.name, unit.block, (unit.weights,))
    return list(blocks.values())

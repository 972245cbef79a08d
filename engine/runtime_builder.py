"""Builds the `ZeroRuntime` of a model: plans, then units, then the buffers, reducer, unsharding and
hooks that connect them. The one place where stage, precision and layout meet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rayzero.engine.compression.gradients import make_grad_reduction
from rayzero.engine.compression.weights import make_weight_gather
from rayzero.engine.device import get_device
from rayzero.engine.layout.packed import (
    is_packed,
    is_wrapper,
    place_packed,
    scale_tensors,
    stays_whole,
)
from rayzero.engine.layout.units import (
    UnitPlan,
    find_large_modules,
    name_params,
    plan_blocks,
    plan_buckets,
)
from rayzero.engine.offload.stores import StateStore
from rayzero.engine.optim.param_groups import ParamGroups
from rayzero.engine.precision.norm_buffers import hook_norms
from rayzero.engine.zero.build_context import BuildContext
from rayzero.engine.zero.gather_buffers import Block, GatherBuffers
from rayzero.engine.zero.grad_reduction import GradReduction, UnitGradSpec
from rayzero.engine.zero.gradients import GradBufferPool, GradStore, PartialGrads, ShardedGrads
from rayzero.engine.zero.hooks import hook_blocks, hook_gradients
from rayzero.engine.zero.parameters import (
    ReplicatedWeights,
    ShardedWeights,
    WeightStore,
    param_views,
    set_param_data,
)
from rayzero.engine.zero.placement import Collective, Placement
from rayzero.engine.zero.reducer import Reducer
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.scratch import map_zeros
from rayzero.engine.zero.unit import Unit
from rayzero.engine.zero.unshard import UnshardScheduler
from rayzero.engine.zero.unused_params import UnusedParams

log = logging.getLogger("rayzero.engine")

NUM_GRAD_BUFFERS = 3  # one is filled, one is reduced, one is still read by other ranks


def make_runtime(
    model: nn.Module, groups: ParamGroups, context: BuildContext, factor: float
) -> ZeroRuntime:
    """Places the model's parameters and connects them to the ranks. Reduced gradients have yet to
    be multiplied by `factor`, loss scaling aside."""
    stage = context.stage
    reduction = make_grad_reduction(context, factor)
    zero, rayzero = context.config.zero_optimization, context.config.rayzero
    place_packed(model, context.device)
    large = find_large_modules(model, rayzero.unshard_modules, rayzero.unshard_min_numel)
    plans = _plan_units(model, groups, context, large)
    if stage.shards_weights and not context.restoring:
        context.materializer.agree_on_files(plans, context.collectives)
    grad_buffers = make_grad_buffers(plans, context)
    units = [
        make_unit(plan, context, grad_buffers, reduction, store)
        for plan, store in zip(plans, context.offload.state_stores(plans), strict=True)
    ]
    ungrouped = place_ungrouped(model, plans, context)
    context.materializer.clear()
    trainable = [unit for unit in units if unit.grads is not None]
    stores = [(unit.grads, len(unit.params)) for unit in units if unit.grads is not None]
    reducer = Reducer(stores, grad_buffers, overlap=zero.overlap_comm)
    blocks = make_blocks(units, large)
    hooks = hook_gradients(trainable, blocks, reducer)
    scheduler = UnshardScheduler(
        blocks,
        GatherBuffers(blocks, rayzero.gather_buffers),
        make_weight_gather(context),
        reducer.backward,
        reshard_after_forward=rayzero.reshard_after_forward,
    )
    if blocks:
        hooks += hook_blocks(model, blocks, scheduler)
    is_error = not zero.ignore_unused_parameters
    is_tracked = is_error or rayzero.unused_gradients == "none"
    unused_params = UnusedParams(trainable if is_tracked else (), is_error=is_error)
    hooks += unused_params.hook()
    return ZeroRuntime(
        stage=stage,
        precision=context.precision,
        collectives=context.collectives,
        units=units,
        offload=context.offload,
        ungrouped_params=ungrouped,
        grad_reduction=reduction,
        reducer=reducer,
        unshard_scheduler=scheduler,
        unused_params=unused_params,
        hooks=hooks + hook_norms(model),
    )


def make_grad_buffers(plans: Sequence[UnitPlan], context: BuildContext) -> GradBufferPool | None:
    """Returns the buffers from which gradients are reduced into shards, part by part; None where
    gradients are not sharded."""
    trainable = [plan for plan in plans if plan.trainable]
    if context.stage.main_grads is not Placement.SHARDED or not trainable:
        return None
    # All buffers have the widest of the grad dtypes, into which the other dtypes convert exactly.
    dtypes = [context.precision.grad_dtype(plan.params[0].dtype) for plan in trainable]
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    zeros, device = context.collectives.zeros, get_device(context.device)
    part_numel = context.config.zero_optimization.reduce_bucket_size or device.part_numel
    return GradBufferPool(lambda numel: zeros(numel, widest), NUM_GRAD_BUFFERS, part_numel)


def _plan_units(
    model: nn.Module, groups: ParamGroups, context: BuildContext, large: list[nn.Module]
) -> list[UnitPlan]:
    """Returns plans of units in launch order: about the order in which backward completes them."""
    stage, world_size = context.stage, context.collectives.world_size
    named_params = name_params(model, groups.group_of)
    params = [named for named in named_params if not stays_whole(named.param)]
    if stage.shards_weights:
        # Some quantized parameters cannot be cut.
        kept = [named for named in named_params if stays_whole(named.param)]
        if kept and not context.collectives.rank:
            text = (
                "%d quantized parameters, such as %s (%s), are not sharded: every rank holds them"
            )
            log.info(text, len(kept), kept[0].name, type(kept[0].param).__name__)
        classes = context.config.rayzero.unshard_modules
        return plan_blocks(model, params, classes, world_size, large)[::-1]
    zero = context.config.zero_optimization
    gathered = stage.weight_collective is Collective.ALL_GATHER
    max_numel = zero.allgather_bucket_size if gathered else None
    limits = get_device(context.device).bucket_numel
    return plan_buckets(params, zero.reduce_bucket_size, world_size, max_numel, limits)


def make_unit(
    plan: UnitPlan,
    context: BuildContext,
    buffers: GradBufferPool | None,
    reduction: GradReduction,
    store: StateStore,
) -> Unit:
    """Builds one unit from rank 0's values. Only this unit is materialized in full meanwhile.

    The model's own tensors are released: its parameters become views of the engine's tensors.
    """
    stage, layout = context.stage, plan.layout
    shard = layout.shard(context.collectives.rank)
    sharded_update = stage.optimizer_state is Placement.SHARDED
    owned = shard if sharded_update else slice(0, layout.numel)
    original = _initial_values(plan, owned, context)
    weights = _make_weights(plan, original, context)
    main: Tensor | None = None
    grads: GradStore | None = None
    if plan.trainable:
        main = store.main_weights(_part(original, plan, owned), weights.owned_range(owned))
        dtype = context.precision.grad_dtype(plan.params[0].dtype)
        replicated = owned != shard or layout.world_size == 1
        op = reduction.reduce_op(UnitGradSpec(layout, dtype, shard, replicated))
        transfer = store.grad_transfer
        if buffers is None:
            flat = context.collectives.zeros(layout.numel, dtype)
            collective = stage.gradient_collective
            grads = PartialGrads(layout, flat, owned, collective, op, transfer, shard=shard)
        else:
            numel = owned.stop - owned.start
            if transfer is None:
                part = _untouched_zeros(numel, dtype, context.device)
            else:
                part = transfer.host_zeros(numel, dtype)
            grads = ShardedGrads(layout, part, owned, buffers, op, transfer)
    return Unit(layout, plan.params, weights, main, grads, owned, shard, plan.module, store)


def _untouched_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a flat tensor of zeros. In host memory, its pages are allocated when they are first
    written, so that gradients take no memory while a model is loaded."""
    if device.type != "cpu" or get_device(device).asynchronous:
        return torch.zeros(numel, dtype=dtype, device=device)
    return map_zeros(numel * dtype.itemsize).view(dtype)


def _make_weights(plan: UnitPlan, original: Tensor, context: BuildContext) -> WeightStore:
    collectives, gather = context.collectives, context.offload.shard_gather
    packed = is_packed(plan.params[0])  # a unit's parameters are all packed, or none is
    dtype = original.dtype if packed else context.precision.model_dtype(original.dtype)
    sharded = context.stage.shards_weights
    values = _part(original, plan, plan.layout.shard(collectives.rank)) if sharded else original
    if gather is not None:
        values = context.offload.host_shard(values.numel(), dtype).copy_(values)
    elif sharded or dtype is not original.dtype:
        values = collectives.zeros(values.numel(), dtype).copy_(values)
    if sharded:
        return ShardedWeights(plan.layout, plan.params, values, gather)
    return ReplicatedWeights(plan.layout, plan.params, values)


def _initial_values(plan: UnitPlan, owned: slice, context: BuildContext) -> Tensor:
    """Returns the unit's initial values; only those of the range `owned`, if weights are sharded
    and each rank can read its values from files."""
    files = [context.materializer.file_of(param) for param in plan.params]
    if not context.stage.shards_weights or None in files or context.restoring:
        return _flatten_unit(plan, context)
    flat = context.scratch.flat(owned.stop - owned.start, plan.params[0].dtype).zero_()
    for part in plan.layout.overlaps(owned):
        if (file := files[part.index]) is not None:
            file.read(part.start, flat[part.memory])
    return flat


def _part(values: Tensor, plan: UnitPlan, part: slice) -> Tensor:
    """Returns the range `part` of a unit. `values` are what `_initial_values` returned: all of the
    unit, or this range."""
    return values[part] if values.numel() == plan.layout.numel else values


def _flatten_unit(plan: UnitPlan, context: BuildContext) -> Tensor:
    """Returns the unit's initial values, rank 0's on every rank, in one buffer, with zeros in the
    padding. If a state is loaded afterwards, all values are zeros.
    """
    dtype = plan.params[0].dtype
    if context.stage.shards_weights:  # only a shard of the buffer is kept
        flat = context.scratch.flat(plan.layout.numel, dtype).zero_()
    else:
        flat = context.collectives.zeros(plan.layout.numel, dtype)
    if context.restoring:
        return flat
    for view, param in zip(param_views(plan.layout, flat), plan.params, strict=True):
        context.materializer.copy_initial_value(param, view)
    context.collectives.broadcast(flat)
    return flat


def place_ungrouped(
    model: nn.Module, plans: Sequence[UnitPlan], context: BuildContext
) -> dict[str, Tensor]:
    """Moves the parameters that are in no unit, and buffers, to the device of the run, with rank
    0's values. Parameters get the run's dtype. Buffers keep their own, because rotary frequencies
    and running statistics must not be rounded to 16 bits, unless the config has
    `data_types.buffer_dtype`. Returns {name: tensor} of these parameters, and of the tensors that
    belong to quantized parameters.
    """
    in_units = {param for plan in plans for param in plan.params}
    ungrouped = {}
    for name, param in model.named_parameters():
        packed = is_packed(param)
        if param not in in_units and not is_wrapper(param):
            dtype = param.dtype if packed else context.precision.model_dtype(param.dtype)
            ungrouped[name] = value = _replicate(param, context, dtype)
            set_param_data(param, value)
        if packed:
            module = model.get_submodule(name.rpartition(".")[0])
            for path, values in scale_tensors(param, module).items():
                ungrouped[f"{name}.{path}"] = _replicate(values, context, values.dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            persistent = name not in module._non_persistent_buffers_set
            dtype = context.precision.dtype_of_buffer(buffer.dtype)
            module._buffers[name] = _replicate(buffer, context, dtype, loaded=persistent)
    return ungrouped


def _replicate(
    tensor: Tensor, context: BuildContext, dtype: torch.dtype, *, loaded: bool = True
) -> Tensor:
    """Returns rank 0's value on every rank, contiguous, as broadcasts need it.

    If a state is restored, a value that the state contains (`loaded`) may be any; other values are
    broadcast after the state is loaded (`BuildContext.unequal`).
    """
    if context.restoring and loaded and tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=dtype, device=context.device)
    value = context.materializer.initial_value(tensor).to(context.device, dtype).contiguous()
    if not context.restoring:
        context.collectives.broadcast(value)
    elif not loaded:
        context.unequal.append(value)
    return value


def make_blocks(units: Sequence[Unit], large: Sequence[nn.Module]) -> list[Block]:
    """Returns the blocks whose weights are gathered before use, each with all of its units. `large`
    are the modules outside the repeated blocks."""
    blocks: dict[nn.Module, Block] = {}
    for unit in units:
        if unit.module is not None and isinstance(unit.weights, ShardedWeights):
            if unit.module not in blocks:
                blocks[unit.module] = Block(unit.name, unit.module, [], unit.module in large)
            blocks[unit.module].units.append(unit.weights)
    return list(blocks.values())

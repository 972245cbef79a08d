"""Builds the `ZeroRuntime` of a model: units, buffers, reducer, unsharding and hooks."""

from __future__ import annotations

import logging

from torch import nn

from rayzero.engine.compression.select import make_grad_reduction, make_weight_gather
from rayzero.engine.config import EngineConfig
from rayzero.engine.device import get_device
from rayzero.engine.layout.packed import place_packed, stays_whole
from rayzero.engine.layout.units import (
    NamedParam,
    UnitPlan,
    find_large_modules,
    name_params,
    plan_blocks,
    plan_buckets,
)
from rayzero.engine.optim.param_groups import ParamGroups
from rayzero.engine.precision.norm_buffers import hook_norms
from rayzero.engine.zero.build import (
    BuildContext,
    make_blocks,
    make_grad_buffers,
    make_unit,
    place_ungrouped,
)
from rayzero.engine.zero.gather_buffers import Block, GatherBuffers
from rayzero.engine.zero.grad_buffers import GradBufferPool
from rayzero.engine.zero.hooks import hook_blocks, hook_gradients
from rayzero.engine.zero.lazy_weights import LazyWeights
from rayzero.engine.zero.placement import Collective, Placement
from rayzero.engine.zero.reducer import Reducer
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.unit import Unit
from rayzero.engine.zero.unshard import UnshardScheduler
from rayzero.engine.zero.unused_params import UnusedParams

log = logging.getLogger("rayzero.engine")

NUM_GRAD_BUFFERS = 3  # one is filled, one is reduced, one is still read by other ranks


def make_runtime(
    model: nn.Module,
    groups: ParamGroups,
    config: EngineConfig,
    context: BuildContext,
    factor: float,
) -> ZeroRuntime:
    """Places the model's parameters and connects them to the ranks. Reduced gradients are still to
    be multiplied by `factor`, before loss scaling."""
    collectives, stage = context.collectives, context.stage
    reduction = make_grad_reduction(config, context, factor)
    rayzero = config.rayzero
    place_packed(model, context.device)
    large = find_large_modules(model, rayzero.unshard_modules, rayzero.unshard_min_numel)
    plans = _plan_units(model, groups, config, context, large)
    _find_files(plans, context)
    grad_buffers = make_unit_grad_buffers(plans, context, config)
    units = [
        make_unit(plan, context, grad_buffers, reduction, store)
        for plan, store in zip(plans, context.offload.state_stores(plans), strict=True)
    ]
    ungrouped = place_ungrouped(model, plans, context)
    context.materializer.clear()
    trainable = [unit for unit in units if unit.grads is not None]
    stores = [(unit.grads, len(unit.params)) for unit in units if unit.grads is not None]
    reducer = Reducer(stores, grad_buffers, overlap=config.zero_optimization.overlap_comm)
    blocks = make_blocks(units, large)
    hooks = hook_gradients(trainable, blocks, reducer)
    scheduler = None
    if blocks:
        scheduler = _make_unshard_scheduler(blocks, config, context)
        hooks += hook_blocks(model, blocks, scheduler)
    lazy_weights = None
    if rayzero.overlap_weight_gather and stage.weight_collective is Collective.ALL_GATHER:
        lazy_weights = LazyWeights(model, units)
        hooks += lazy_weights.hooks
    unused_params = _make_unused_params(trainable, config)
    hooks += unused_params.hook() if unused_params is not None else []
    return ZeroRuntime(
        stage=stage,
        precision=context.precision,
        collectives=collectives,
        units=units,
        offload=context.offload,
        ungrouped_params=ungrouped,
        grad_reduction=reduction,
        reducer=reducer,
        unshard_scheduler=scheduler,
        lazy_weights=lazy_weights,
        unused_params=unused_params,
        hooks=hooks + hook_norms(model),
    )


def make_unit_grad_buffers(
    plans: list[UnitPlan], context: BuildContext, config: EngineConfig
) -> GradBufferPool | None:
    """The buffers that gradients are reduced from, as the config says; see `make_grad_buffers`."""
    limit = config.zero_optimization.reduce_bucket_size or get_device(context.device).part_numel
    return make_grad_buffers(plans, context, NUM_GRAD_BUFFERS, limit)


def _make_unshard_scheduler(
    blocks: list[Block], config: EngineConfig, context: BuildContext
) -> UnshardScheduler:
    return UnshardScheduler(
        blocks,
        GatherBuffers(blocks, config.rayzero.gather_buffers),
        make_weight_gather(config, context),
        reshard_after_forward=config.rayzero.reshard_after_forward,
    )


def _make_unused_params(units: list[Unit], config: EngineConfig) -> UnusedParams | None:
    is_error = not config.zero_optimization.ignore_unused_parameters
    is_tracked = is_error or config.rayzero.unused_gradients == "none"
    return UnusedParams(units, is_error=is_error) if is_tracked else None


def _leave_whole(params: list[NamedParam], context: BuildContext) -> list[NamedParam]:
    """The parameters that can be in units: quantized ones may be tensors that cannot be cut."""
    kept = [it for it in params if stays_whole(it.param)]
    if kept and context.stage.model_weights is Placement.SHARDED and not context.collectives.rank:
        text = "%d quantized parameters, such as %s (%s), are not sharded: every rank holds them"
        log.info(text, len(kept), kept[0].name, type(kept[0].param).__name__)
    return [it for it in params if not stays_whole(it.param)]


def _find_files(plans: list[UnitPlan], context: BuildContext) -> None:
    """Finds files of initial values where each rank keeps a shard only: it may read that itself.
    Collective if the model was built in `zero_init`, which is so on all ranks or on none."""
    fresh = not context.restoring and context.device.type != "meta"  # no memory plan
    params = [param for plan in plans for param in plan.params]
    deferred = any(param.is_meta for param in params)
    if context.stage.model_weights is Placement.SHARDED and fresh and deferred:
        context.materializer.agree_on_files(params, context.collectives)


def _plan_units(
    model: nn.Module,
    groups: ParamGroups,
    config: EngineConfig,
    context: BuildContext,
    large: list[nn.Module],
) -> list[UnitPlan]:
    """Units in launch order: about the order in which backward completes them."""
    stage, world_size = context.stage, context.collectives.world_size
    params = _leave_whole(name_params(model, groups.group_of), context)
    if stage.model_weights is Placement.SHARDED:
        return plan_blocks(model, params, config.rayzero.unshard_modules, world_size, large)[::-1]
    zero = config.zero_optimization
    gathered = stage.weight_collective is Collective.ALL_GATHER
    max_numel = zero.allgather_bucket_size if gathered else None
    limits = get_device(context.device).bucket_numel
    return plan_buckets(params, zero.reduce_bucket_size, world_size, max_numel, limits)

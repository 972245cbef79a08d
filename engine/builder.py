"""The one place that picks implementations. `api.entry` calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from rayzero.engine.accounting import StepWork, peak_flops
from rayzero.engine.comm.process_group import connect_collectives
from rayzero.engine.compression.onebit_adam import OneBitAdamReduction
from rayzero.engine.compression.select import make_grad_reduction, make_weight_gather
from rayzero.engine.config import EngineConfig, resolve_batch_sizes
from rayzero.engine.data.loader import LoaderPlan, MapDataset, StepLoader, dataset_length
from rayzero.engine.data.sampling import SampleOrder, TrainingProgress
from rayzero.engine.engine import Engine
from rayzero.engine.errors import ConfigError
from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.layout.units import NamedParam, UnitPlan, name_params, plan_blocks, plan_buckets
from rayzero.engine.metrics import StepMeter
from rayzero.engine.offload.plan import plan_offload
from rayzero.engine.optim.build import OptimizerLike, make_optimizer, regroup_for_optimizer
from rayzero.engine.optim.param_groups import ParamGroups, find_param_groups, freeze_all_params
from rayzero.engine.optim.schedule import Scheduler, check_schedule, make_schedule
from rayzero.engine.optim.sharded_optimizer import ShardedOptimizer, optimizer_shards
from rayzero.engine.optim.whole_param_exchange import ShardedWholeParamOps
from rayzero.engine.precision.policy import choose_precision, post_reduce_scale
from rayzero.engine.session import HostSession, current_session
from rayzero.engine.settings import Settings
from rayzero.engine.state.training import TrainingState
from rayzero.engine.zero.build import (
    BuildContext,
    make_blocks,
    make_grad_buffers,
    make_reducer,
    make_units,
    place_ungrouped,
)
from rayzero.engine.zero.deferred_init import Materializer, ScratchBuffer, zero_init
from rayzero.engine.zero.gather_buffers import GatherBuffers
from rayzero.engine.zero.hooks import hook_blocks, hook_gradients
from rayzero.engine.zero.placement import STAGES, Collective, Placement, Stage
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.unshard import UnshardScheduler

SchedulerLike = Scheduler | Callable[[torch.optim.Optimizer], Scheduler]


NUM_GRAD_BUFFERS = 3  # one fills, one is summed, one is still read by other ranks


def build_engine(
    config: EngineConfig,
    model: nn.Module | Callable[[], nn.Module] | None,
    optimizer: OptimizerLike | None,
    model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None,
    training_data: MapDataset | None,
    lr_scheduler: SchedulerLike | None,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> tuple[Engine, torch.optim.Optimizer | None, StepLoader | None, Scheduler | None]:
    """What `initialize` returns, made of a checked config and its other arguments."""
    session = current_session()
    model = _call_model_fn(model)
    with session.resume_from() if session is not None else nullcontext() as source:
        engine, schedule = _make_engine(
            config, model, model_parameters, optimizer, lr_scheduler, source
        )
    if training_data is not None:
        engine.training_dataloader = _make_loader(training_data, session, engine, collate_fn)
    if session is not None:
        session.on_engine_ready(engine)
    return engine, engine.optimizer, engine.training_dataloader, schedule


def _make_engine(
    config: EngineConfig,
    model: nn.Module,
    model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None,
    optimizer: OptimizerLike | None,
    lr_scheduler: SchedulerLike | None,
    source: StateSource | None,
) -> tuple[Engine, Scheduler | None]:
    """Builds an engine; its state comes from `source`, if there is one."""
    session = current_session()
    if source is not None:
        config = _with_saved_batch_sizes(config, source.metadata(0))
    groups = _resolve_param_groups(config, model, model_parameters, optimizer)
    recipe = _make_build_context(config, model, restoring=source is not None)
    if session is not None:
        recipe.collectives.wait_observer = session.on_collective_wait
    shares = session.shares if session is not None else ()
    settings = _resolve_settings(config, recipe, shares)
    runtime = _make_runtime(model, groups, config, recipe, settings.post_reduce_scale)
    local = _make_optimizer(runtime, groups, optimizer, config, recipe.device)
    if isinstance(runtime.grad_reduction, OneBitAdamReduction):
        runtime.grad_reduction.track_optimizer(local)
    schedule = _make_schedule(local.torch_optimizer, lr_scheduler, config)
    batches = settings.batches
    progress = TrainingProgress(
        micro_batch_weight=settings.micro_batch_weight,
        global_batch=batches.global_batch,
        micro_batch=batches.micro_batch,
    )
    state = TrainingState(model, runtime, local, schedule, progress, recipe.device)
    if source is not None:
        state.load(source)
    peak = config.rayzero.peak_flops or peak_flops(
        recipe.device, recipe.precision.model_dtype(torch.float32)
    )
    work = StepWork(batches.micro_steps, peak)
    meter = StepMeter(runtime, local, progress, session, settings.log_every_steps, work)
    return Engine(model, runtime, local, schedule, state, settings, meter), schedule


def _resolve_param_groups(
    config: EngineConfig,
    model: nn.Module,
    given: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None,
    optimizer: OptimizerLike | None,
) -> ParamGroups:
    if optimizer is None and config.optimizer is None:
        return freeze_all_params(model)
    client = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    groups = find_param_groups(model, given, client)
    return (
        groups if optimizer is not None else regroup_for_optimizer(config.optimizer, model, groups)
    )


def _with_saved_batch_sizes(config: EngineConfig, small: dict[str, Any]) -> EngineConfig:
    """The config with the batch sizes that a state was trained with: a step is the same whatever
    the world size became. A config that asks for another global batch gets it."""
    total = small.get("global_batch")
    asked, steps = config.train_batch_size, config.gradient_accumulation_steps
    if total is None or asked not in (None, total) or (asked == total and steps is None):
        return config
    sizes = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": config.train_micro_batch_size_per_gpu
        or small["micro_batch"],
        "gradient_accumulation_steps": None,  # what it takes at this world size
    }
    return config.model_copy(update=sizes)


def _make_build_context(config: EngineConfig, model: nn.Module, *, restoring: bool) -> BuildContext:
    collectives, device = connect_collectives()
    zero = config.zero_optimization
    precision = choose_precision(config, device)
    offload = plan_offload(zero, precision, device, collectives)
    return BuildContext(
        stage=STAGES[zero.stage].for_world_size(
            collectives.world_size, moves=offload.separate_memory
        ),
        precision=precision,
        collectives=collectives,
        device=device,
        materializer=Materializer(model, device),
        scratch=ScratchBuffer(device),
        offload=offload,
        restoring=restoring,
    )


def _resolve_settings(
    config: EngineConfig, recipe: BuildContext, shares: Sequence[float]
) -> Settings:
    world_size = recipe.collectives.world_size
    batches = resolve_batch_sizes(config, world_size, shares)
    return Settings(
        stage=config.zero_optimization.stage,
        batches=batches,
        clip_norm=config.gradient_clipping,
        log_every_steps=config.steps_per_print,
        device=recipe.device,
        micro_batch_weight=1.0 / (batches.micro_steps * world_size),
        post_reduce_scale=post_reduce_scale(
            batches.micro_steps,
            world_size,
            average_before_reduce=recipe.precision.average_before_reduce,
            prescale=config.prescale_gradients,
            predivide=config.gradient_predivide_factor,
        ),
        config=config,
    )


def _make_loader(
    data: MapDataset,
    session: HostSession | None,
    engine: Engine,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> StepLoader:
    seed = session.seed if session is not None else 0
    batches = engine.settings.batches
    plan = LoaderPlan(
        batches.global_batch, batches.micro_batch, engine.world_size, engine.rank, batches.shares
    )
    order = SampleOrder(dataset_length(data), seed)
    return StepLoader(data, order, plan, engine.progress, collate_fn, engine.device)


def _call_model_fn(model: nn.Module | Callable[[], nn.Module] | None) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise ConfigError(
            f"initialize(model=...) got {type(model).__name__}",
            allowed="a torch.nn.Module, or a function that returns one",
        )
    with zero_init():
        built = model()
    if not isinstance(built, nn.Module):
        raise ConfigError(
            f"the model function returned {type(built).__name__}", allowed="a torch.nn.Module"
        )
    return built


def _make_runtime(
    model: nn.Module,
    groups: ParamGroups,
    config: EngineConfig,
    recipe: BuildContext,
    factor: float,
) -> ZeroRuntime:
    collectives, stage, way = (
        recipe.collectives,
        recipe.stage,
        make_grad_reduction(config, recipe, factor),
    )
    params = name_params(model, groups.group_of)
    plans = plan_units(model, params, config, stage, collectives.world_size)
    grad_slots = make_grad_buffers(plans, recipe, NUM_GRAD_BUFFERS)
    units = make_units(plans, recipe, grad_slots)
    in_units = {param for plan in plans for param in plan.params}
    loose = place_ungrouped(model, in_units, recipe)
    recipe.materializer.clear()
    trainable = [unit for unit in units if unit.grads is not None]
    overlap = config.zero_optimization.overlap_comm
    reducer = make_reducer(trainable, way, grad_slots, overlap=overlap)
    hooks = hook_gradients(trainable, reducer)
    gatherer, weight_slots = None, None
    if blocks := make_blocks(units):
        weight_slots = GatherBuffers(blocks, config.rayzero.gather_buffers)
        gatherer = UnshardScheduler(blocks, weight_slots, make_weight_gather(config, recipe))
        hooks += hook_blocks(model, blocks, gatherer)
    return ZeroRuntime(
        stage,
        recipe.precision,
        collectives,
        units,
        recipe.offload,
        loose,
        way,
        reducer,
        grad_slots,
        gatherer,
        weight_slots,
        hooks,
    )


def plan_units(
    model: nn.Module,
    params: list[NamedParam],
    config: EngineConfig,
    stage: Stage,
    world_size: int,
) -> list[UnitPlan]:
    """Units in launch order: about the order in which backward completes them."""
    if stage.model_weights is Placement.SHARDED:
        return plan_blocks(model, params, config.rayzero.unshard_modules, world_size)[::-1]
    zero = config.zero_optimization
    gathered = stage.weight_collective is Collective.ALL_GATHER
    most = zero.allgather_bucket_size if gathered else None
    return plan_buckets(params, zero.reduce_bucket_size, world_size, most)


def _make_optimizer(
    runtime: ZeroRuntime,
    groups: ParamGroups,
    given: OptimizerLike | None,
    config: EngineConfig,
    device: torch.device,
) -> ShardedOptimizer:
    runs, collectives = optimizer_shards(runtime.units), runtime.collectives
    return make_optimizer(
        given,
        config.optimizer,
        groups,
        runs,
        lambda: ShardedWholeParamOps(runtime.units, runs, collectives, device),
    )


def _make_schedule(
    optimizer: torch.optim.Optimizer, given: SchedulerLike | None, config: EngineConfig
) -> Scheduler | None:
    if given is not None:
        return check_schedule(given if hasattr(given, "step") else given(optimizer), optimizer)
    return None if config.scheduler is None else make_schedule(config.scheduler, optimizer)

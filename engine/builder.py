"""Builds the parts of an `Engine`: the one place that chooses implementations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from rayzero.engine.accounting import StepWork, flops_per_token, peak_flops
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.comm.process_group import connect_alone, connect_collectives
from rayzero.engine.compiling import (
    compile_in_place,
    keep_batch_size_dynamic,
    modules_around,
    refuse_compiled,
)
from rayzero.engine.compression.gradients import OneBitAdamReduction
from rayzero.engine.config import EngineConfig
from rayzero.engine.data.batch_sizes import BatchSizes, resolve_batch_sizes
from rayzero.engine.data.loader import StepLoader
from rayzero.engine.data.micro_batches import MicroBatches
from rayzero.engine.data.sample_source import DatasetSource, MapDataset, SampleSource
from rayzero.engine.data.sampling import StepSplit, TrainingProgress, assign_step
from rayzero.engine.data.streams.api import stream
from rayzero.engine.data.streams.block import BlockSource
from rayzero.engine.data.streams.iterable_source import IterableSource
from rayzero.engine.data.streams.readers import IterableStream
from rayzero.engine.data.streams.source import BlockStream, StreamSource
from rayzero.engine.errors import ConfigError
from rayzero.engine.layout.leaf_modules import apply_leaf_names
from rayzero.engine.layout.units import find_blocks
from rayzero.engine.metrics import StepMeter
from rayzero.engine.monitors import check_packages
from rayzero.engine.offload.plan import plan_offload
from rayzero.engine.optim.build import OptimizerLike, make_optimizer, regroup_for_optimizer
from rayzero.engine.optim.param_groups import ParamGroups, find_param_groups, freeze_all_params
from rayzero.engine.optim.schedule import Scheduler, check_schedule, make_schedule
from rayzero.engine.optim.sharded_optimizer import ShardedOptimizer, optimizer_shards
from rayzero.engine.optim.whole_params import NeedsWholeParams
from rayzero.engine.own_backward import follow_zero_grad
from rayzero.engine.precision.policy import Precision, choose_precision, post_reduce_scale
from rayzero.engine.runtime_builder import make_runtime
from rayzero.engine.session import HostSession
from rayzero.engine.settings import Settings
from rayzero.engine.state.training import TrainingState
from rayzero.engine.training_step import TrainingStep
from rayzero.engine.zero.build_context import BuildContext
from rayzero.engine.zero.deferred_init import Materializer, zero_init
from rayzero.engine.zero.placement import STAGES
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.scratch import ScratchBuffer

SchedulerLike = Scheduler | Callable[[torch.optim.Optimizer], Scheduler]


def build_training_step(
    config: EngineConfig,
    model: nn.Module,
    optimizer: OptimizerLike | None,
    model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None,
    lr_scheduler: SchedulerLike | None,
    session: HostSession,
    undo: ExitStack,
) -> TrainingStep:
    """Builds an engine's parts from a checked config; the host's session may have a state to
    restore. `undo` gets a callback that removes the hooks from the model, so that another engine
    can be built of the model after an error. Collective."""
    check_packages(config)
    session.on_model(model)
    with session.resume_from() as source:
        if source is not None:
            config = with_saved_batch_sizes(config, source.metadata(0))
        if STAGES[config.zero_optimization.stage].shards_weights:  # also on one rank: more may join
            apply_leaf_names(model, config.zero_optimization.leaf_module)
            refuse_compiled(modules_around(model, _find_blocks(model, config)))
        groups = _resolve_param_groups(config, model, model_parameters, optimizer)
        collectives = connect_alone() if session.builds_alone else connect_collectives()
        if session.in_job:
            collectives.wait_observer = session.on_collective_wait
        restoring = source is not None
        context = make_build_context(
            config, model, collectives, restoring=restoring, elastic=session.in_job
        )
        settings = resolve_settings(context, session.shares)
        runtime = make_runtime(model, groups, context, settings.post_reduce_scale)
        undo.callback(runtime.remove_hooks)
        sharded = make_sharded_optimizer(runtime, groups, optimizer, config)
        schedule = _make_schedule(sharded.torch_optimizer, lr_scheduler, config)
        progress = TrainingProgress()
        state = TrainingState(model, runtime, sharded, schedule, progress)
        if source is not None:
            state.load(source)
            for tensor in context.unequal:
                collectives.broadcast(tensor)
    if config.compile.enabled:
        compile_model(model, config)
    if session.in_job and "dynamic" not in config.compile.kwargs:
        keep_batch_size_dynamic(model, runtime.hooks)
    dtype = context.precision.model_dtype(torch.float32)
    peak = config.rayzero.peak_flops or peak_flops(collectives.device, dtype)
    work = StepWork(settings.batches.micro_steps, peak, flops_per_token(runtime))
    meter = StepMeter(runtime, sharded, progress, session, config, work)
    micro_batches = MicroBatches(progress, split_step(settings, collectives), session)
    step = TrainingStep(runtime, sharded, state, settings, meter, micro_batches)
    use_batches(step, settings.batches)
    follow_zero_grad(model, step.tracker)
    return step


def compile_model(
    model: nn.Module, config: EngineConfig, options: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Compiles the model, or its blocks at stage 3, in place. `options` of torch.compile replace
    the config's."""
    given = {"backend": config.compile.backend, **config.compile.kwargs, **options}
    compile_in_place(model, _find_blocks(model, config), given)


def _find_blocks(model: nn.Module, config: EngineConfig) -> list[nn.Module]:
    """Returns the blocks of stage 3, also on one rank: more may join. None at other stages."""
    if not STAGES[config.zero_optimization.stage].shards_weights:
        return []
    return find_blocks(model, config.rayzero.unshard_modules)


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


def with_saved_batch_sizes(config: EngineConfig, saved: dict[str, Any]) -> EngineConfig:
    """Returns the config with the batch sizes of the saved state, so that a step has the same
    samples at any world size. A config with another global batch keeps its own sizes."""
    total = saved.get("global_batch")
    given, steps = config.train_batch_size, config.gradient_accumulation_steps
    if total is None or given not in (None, total) or (given == total and steps is None):
        return config
    sizes = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": config.train_micro_batch_size_per_gpu
        or saved["micro_batch"],
        "gradient_accumulation_steps": None,  # follows from the world size
    }
    return config.model_copy(update=sizes)


def make_build_context(
    config: EngineConfig,
    model: nn.Module,
    collectives: Collectives,
    *,
    restoring: bool,
    elastic: bool,
    precision: Precision | None = None,
) -> BuildContext:
    """Returns the build context of one rank. `precision` is that of an engine that is re-cut; by
    default it is chosen for the config. On the meta device an engine can be built, but not run."""
    zero, device = config.zero_optimization, collectives.device
    precision = precision or choose_precision(config, device)
    offload = plan_offload(zero, precision, collectives)
    # One rank shards nothing, unless shards are stored in other memory than the device's, or the
    # engine may be re-cut for ranks that join later.
    is_fixed = not (offload.separate_memory or elastic)
    stage = STAGES[zero.stage].for_world_size(collectives.world_size, is_fixed=is_fixed)
    if not config.rayzero.reduce_each_micro_step:
        stage = stage.without_micro_step_reductions()
    return BuildContext(
        config=config,
        stage=stage,
        precision=precision,
        collectives=collectives,
        device=device,
        materializer=Materializer(model, device),
        scratch=ScratchBuffer(device),
        offload=offload,
        restoring=restoring,
        elastic=elastic,
    )


def resolve_settings(context: BuildContext, shares: Sequence[float]) -> Settings:
    """Returns the settings for these ranks. Raises ConfigError if the batch sizes do not fit the
    number of ranks."""
    config, world_size = context.config, context.collectives.world_size
    batches = resolve_batch_sizes(config, world_size, shares)
    scale = post_reduce_scale(
        batches.micro_steps,
        world_size,
        average_before_reduce=context.precision.average_before_reduce,
        prescale=config.prescale_gradients,
        predivide=config.gradient_predivide_factor,
    )
    factor = float(world_size) if config.gradient_allreduce_op == "sum" else 1.0
    return Settings(config, batches, scale * factor, factor)


def split_step(settings: Settings, collectives: Collectives) -> StepSplit:
    """Returns this rank's micro-batches of every step."""
    batches = settings.batches
    return StepSplit(
        assign_step(
            batches.global_batch,
            collectives.world_size,
            collectives.rank,
            batches.micro_batch,
            batches.shares,
        )
    )


def use_batches(step: TrainingStep, batches: BatchSizes) -> None:
    """Changes an engine's batch sizes, between two steps."""
    step.settings = replace(step.settings, batches=batches)
    progress, world_size = step.state.progress, step.runtime.collectives.world_size
    work = step.meter.step_work
    work.micro_steps = batches.micro_steps
    if batches.micro_batch != progress.micro_batch:
        work.count_again()
    progress.global_batch, progress.micro_batch = batches.global_batch, batches.micro_batch
    progress.micro_batch_weight = 1.0 / (batches.micro_steps * world_size)


def make_loader(
    step: TrainingStep,
    data: MapDataset | SampleSource | BlockStream | BlockSource | IterableStream,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> StepLoader:
    """Returns the loader of this rank's part of every step."""
    seed = step.meter.session.seed
    if isinstance(data, BlockSource):
        data = stream(data)
    if isinstance(data, BlockStream):
        data = StreamSource(data, seed, step.micro_batches.progress, step.state.register)
    if isinstance(data, IterableStream):
        register = partial(step.state.register, shared=True)
        data = IterableSource(data, seed, step.micro_batches.progress, register)
    if isinstance(data, StreamSource | IterableSource):
        step.meter.step_work.take_stream_counts = data.take_counts
    if not isinstance(data, SampleSource):
        data = DatasetSource(data, seed)
    return StepLoader(
        data,
        step.micro_batches,
        collate_fn,
        step.runtime.collectives.device,
        step.reforming,
        step.settings.config.rayzero.loader,
    )


def make_model(model: nn.Module | Callable[[], nn.Module] | None) -> nn.Module:
    """Returns the model. A function that builds it is called without allocating its memory."""
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise ConfigError(
            f"initialize(model=...) got {type(model).__name__}",
            allowed="a torch.nn.Module, or a function that returns one",
        )
    if isinstance(model, type) and issubclass(model, nn.Module):
        try:
            inspect.signature(model).bind()
        except TypeError as error:
            raise ConfigError(
                f"initialize(model={model.__name__}) got a class, which cannot be called without "
                f"arguments: {error}",
                allowed="a torch.nn.Module, or a function that returns one",
                fix=f"give model={model.__name__}(...)",
            ) from None
    with zero_init():
        built = model()
    if not isinstance(built, nn.Module):
        raise ConfigError(
            f"the model function returned {type(built).__name__}", allowed="a torch.nn.Module"
        )
    return built


def make_sharded_optimizer(
    runtime: ZeroRuntime, groups: ParamGroups, given: OptimizerLike | None, config: EngineConfig
) -> ShardedOptimizer:
    shards = optimizer_shards(runtime.units)
    optimizer = make_optimizer(
        given, config.optimizer, groups, shards, runtime.precision.update_dtype
    )
    bind_optimizer(optimizer, runtime)
    optimizer.resets_other_state = config.rayzero.other_optimizer_state == "reset"
    torch_optimizer = optimizer.torch_optimizer
    if config.rayzero.unused_gradients == "none" and isinstance(torch_optimizer, NeedsWholeParams):
        raise ConfigError(
            "rayzero.unused_gradients is none, and the update is not elementwise: "
            f"{type(torch_optimizer).__name__}",
            allowed="optimizers such as AdamW or SGD",
            fix='set rayzero.unused_gradients: "zero"',
        )
    return optimizer


def bind_optimizer(optimizer: ShardedOptimizer, runtime: ZeroRuntime) -> None:
    """Gives an optimizer what it needs of the ranks, beyond its shards."""
    optimizer.bind_whole_params(runtime.units, runtime.collectives)
    if isinstance(runtime.grad_reduction, OneBitAdamReduction):
        runtime.grad_reduction.track_optimizer(optimizer)


def _make_schedule(
    optimizer: torch.optim.Optimizer, given: SchedulerLike | None, config: EngineConfig
) -> Scheduler | None:
    if given is not None:
        if not hasattr(given, "step") and not callable(given):
            raise ConfigError(
                f"initialize(lr_scheduler=...) got {type(given).__name__}",
                allowed="a scheduler of the optimizer, or a function that makes one",
            )
        return check_schedule(given if hasattr(given, "step") else given(optimizer), optimizer)
    return None if config.scheduler is None else make_schedule(config.scheduler, optimizer)

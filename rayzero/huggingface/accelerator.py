"""Accelerate in a launched script with its own loop: `prepare` continues at the job's step.

The first DataLoader that is prepared with the model follows the job (`accelerated_loop`). Other
loaders, such as an evaluation's, are iterated whole. A schedule that the engine does not have is
stepped as often as before. The training state has all that is needed: the finished steps, the
batches of a step over all ranks, and the number of ranks of the first generation.

A script that resumes from a checkpoint also loads it in a new worker, and begins its loop at the
checkpoint's step. The steps finished since are left out of the loop, and the schedule is stepped
for them.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from rayzero.engine.data.streams.positions import check_sampler
from rayzero.engine.errors import ConfigError
from rayzero.engine.state.metadata import capture_rng, restore_rng
from rayzero.engine.state.registry import read_value
from rayzero.huggingface.accelerated_loop import Place, can_read_again, place_of, skip_from_place
from rayzero.huggingface.scripted_steps import (
    ScriptedSteps,
    SeveralSteps,
    adapt_options,
    brings_no_config,
    check_prepare,
    follow_script,
    split_models,
)
from rayzero.huggingface.streams import check_training_data
from rayzero.workers.launch.adapters import Original, wrap
from rayzero.workers.launch.kept_schedules import apply_rates
from rayzero.workers.session import JobSession

_first: dict[str, int] = {}
"""`ranks` of the first generation that prepared a model, and `batches` of a step over all ranks."""
_STATE = "rayzero.accelerate"
"""The name of `_first` in the training state."""


def patch_partial_state(module: ModuleType) -> None:
    """Called after the import of `accelerate.state`."""
    wrap(module.PartialState, "__init__", _join)


def patch_accelerator(module: ModuleType) -> None:
    """Called after the import of `accelerate.accelerator`."""
    kind = module.Accelerator
    wrap(kind, "__init__", _begin)
    wrap(kind, "prepare", _prepare)
    wrap(kind, "save_state", _save_once)
    wrap(kind, "load_state", _load_and_stay)
    wrap(kind, "clip_grad_norm_", _clip)
    wrap(module, "skip_first_batches", skip_from_place)
    for name in ("accelerate.data_loader", "accelerate"):
        vars(import_module(name))["skip_first_batches"] = module.skip_first_batches


def _join(_: JobSession, init: Original, state: Any, cpu: bool = False, **options: Any) -> None:
    """Replaces `PartialState()`, which without a backend counts one process if there is no GPU."""
    if not state.initialized and not cpu and options.get("backend") is None:
        options["backend"] = dist.get_backend()
    init(state, cpu, **options)


def _begin(
    session: JobSession, init: Original, accelerator: Any, *args: Any, **options: Any
) -> None:
    """Replaces `Accelerator()`."""
    adapt_options(options)
    init(accelerator, *args, **options)
    plugin = accelerator.state.deepspeed_plugin
    accelerator.rayzero_scripted = plugin is not None and brings_no_config(options)
    if plugin is None:
        return
    if accelerator.rayzero_scripted and plugin.is_auto("gradient_clipping"):
        plugin.deepspeed_config["gradient_clipping"] = 0.0
    batches = own_batches(session, "the batch size and gradient_accumulation_steps")
    if batches is not None:
        plugin.gradient_accumulation_steps = accelerator.gradient_accumulation_steps = batches
        plugin.deepspeed_config["gradient_accumulation_steps"] = batches


def own_batches(session: JobSession, fix: str) -> int | None:
    """Returns this rank's batches of a step in a job that has begun, where the batches of all ranks
    do not change; None in any other job. Raises ConfigError if the ranks' parts are unequal."""
    if not session.is_resumed:
        return None
    batches = session.assignment.parts
    if not batches:
        _recall(session)
        batches = _first.get("batches", 0)
    ranks = dist.get_world_size()
    if batches % ranks:
        raise ConfigError(
            f"a step of {batches} batches over {ranks} ranks",
            allowed=f"numbers of ranks that divide {batches}",
            fix=f"change --workers, or {fix}",
        )
    return batches // ranks or None


def _recall(session: JobSession) -> None:
    """Reads `_first` from the state that the script continues from."""
    with session.open_source() as source:
        if source is not None and session.assignment.generation > 1:
            _first.update(read_value(source, session.assignment.rank, _STATE) or {})


def first_ranks(session: JobSession) -> int:
    """Returns the number of ranks of the first generation that prepared a model; the present number
    if none has."""
    if not _first:
        _recall(session)
    return _first.get("ranks", dist.get_world_size())


def _prepare(
    session: JobSession, prepare: Original, accelerator: Any, *args: Any, **options: Any
) -> Any:
    """Replaces `Accelerator.prepare`."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        parts = split_models(args, scripted=accelerator.rayzero_scripted)
        if len(parts) > 1:
            return _prepare_each(session, prepare, accelerator, args, parts, options)
    if accelerator.rayzero_scripted:
        is_known = not plugin.is_auto("train_micro_batch_size_per_gpu")
        check_prepare(args, knows_batch=is_known)
    models = [number for number, given in enumerate(args) if isinstance(given, nn.Module)]
    if accelerator.rayzero_scripted and models:
        accelerator.deepspeed_engine_wrapped = None  # holds one engine; `follow_script` sets all
    result = prepare(accelerator, *args, **options)
    if plugin is None or not models or len(args) < 2:
        return result
    engine = result[models[0]]
    if accelerator.rayzero_scripted:
        follow_script(accelerator, engine, result)
    steps = engine.gradient_accumulation_steps()
    if not _first:
        _recall(session)
    if not _first:
        ranks = dist.get_world_size()
        _first.update(ranks=ranks, batches=steps * ranks)
    if _STATE not in session.registry:
        session.registry.register(_STATE, lambda: dict(_first), _first.update)
    session.divide_step(_first["batches"])
    schedules = [prepared for prepared in result if _is_accelerated(prepared)]
    number = next((n for n, given in enumerate(args) if isinstance(given, DataLoader)), None)
    if number is not None:
        loader = result[number]
        check_sampler(args[number])
        check_training_data(session, loader, _first["ranks"])
        place = Place(session, accelerator, loader, engine.global_steps, **_first)
        place.schedules.schedules = [schedule.scheduler for schedule in schedules]
        place.follow(loader)
        if session.engine is not None and can_read_again(loader):
            session.follow_loop(session.engine)
    for schedule in schedules:
        _continue_schedule(schedule, engine.global_steps)
    return result


def _prepare_each(
    session: JobSession,
    prepare: Original,
    accelerator: Any,
    given: Sequence[Any],
    parts: list[list[int]],
    options: dict[str, Any],
) -> tuple[Any, ...]:
    """Prepares several models, one after the other."""
    if options:
        raise ConfigError(
            f"accelerator.prepare of {len(parts)} models with {', '.join(options)}",
            allowed="models, optimizers, schedules and DataLoaders alone",
        )
    found: dict[int, Any] = {}
    for places in parts:
        prepared = _prepare(session, prepare, accelerator, *(given[place] for place in places))
        found.update(zip(places, prepared, strict=True))
    return tuple(found[place] for place in range(len(given)))


def _save_once(
    session: JobSession,
    save_state: Original,
    accelerator: Any,
    output_dir: str | None = None,
    *args: Any,
    **options: Any,
) -> Any:
    """Replaces `save_state`. A new worker's script does not save again what was saved after an
    epoch finished before, so the files next to the engine's checkpoint stay. Automatic checkpoint
    numbers, which a new worker counts from 0 again, continue with the next free one."""
    if session.engine is not None and session.engine.progress.script_lag:
        return output_dir
    if session.restored_step and accelerator.project_configuration.automatic_checkpoint_naming:
        folder = os.path.join(accelerator.project_dir, "checkpoints", "checkpoint_")
        while os.path.exists(f"{folder}{accelerator.save_iteration}"):
            accelerator.project_configuration.iteration += 1
    return save_state(accelerator, output_dir, *args, **options)


def _load_and_stay(
    session: JobSession, load_state: Original, accelerator: Any, *args: Any, **options: Any
) -> None:
    """Replaces `load_state`. If the engine stays at a later step than the checkpoint's, the
    schedules go to that step, and the random states and the count of micro-batches stay. Registered
    objects are loaded."""
    if session.engine is None or not session.restored_step:
        load_state(accelerator, *args, **options)
        return
    rng, micro_batches = capture_rng(accelerator.device), accelerator.step
    load_state(accelerator, *args, **options)
    accelerator.step = micro_batches
    loaded_step = session.loop.asked_step
    if missed := session.engine.progress.step - loaded_step:
        restore_rng(rng, accelerator.device)
        for schedule in filter(_is_accelerated, accelerator._schedulers):
            apply_rates(schedule.scheduler)
            _advance(schedule, missed)
    for loader in accelerator._dataloaders:
        if (place := place_of(loader)) is not None:
            place.missed_steps, place.loaded_step = missed, loaded_step


def _clip(
    _: JobSession,
    clip: Original,
    accelerator: Any,
    parameters: Any,
    max_norm: float,
    norm_type: float = 2,
    **options: Any,
) -> Any:
    """Replaces `clip_grad_norm_`."""
    steps = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if isinstance(steps, SeveralSteps):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        steps = steps.of(parameters)
    if isinstance(steps, ScriptedSteps):
        return steps.clip_and_step(max_norm, norm_type)
    return clip(accelerator, parameters, max_norm, norm_type, **options)


def _is_accelerated(given: Any) -> bool:
    """Returns whether this is a schedule of Accelerate, which the engine does not have."""
    return type(given).__name__ == "AcceleratedScheduler"


def _continue_schedule(schedule: Any, steps: int) -> None:
    """Steps a schedule as often as `steps` steps did. From now on each step advances it as often as
    on the first ranks."""
    _advance(schedule, steps)
    if not schedule.step_with_optimizer or schedule.split_batches:
        return
    skipped = schedule.optimizers

    def step(*args: Any, **options: Any) -> None:
        due = schedule.gradient_state.sync_gradients
        if due and not any(optimizer.step_was_skipped for optimizer in skipped):
            _advance(schedule, 1)

    schedule.step = step


def _advance(schedule: Any, steps: int) -> None:
    """Steps a schedule as often as Accelerate does in `steps` steps on the first ranks."""
    is_per_rank = schedule.step_with_optimizer and not schedule.split_batches
    inner = schedule.scheduler
    last = getattr(inner, "total_steps", math.inf)  # OneCycleLR's
    with warnings.catch_warnings():  # by torch: the schedule is stepped before its optimizer
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for _ in range(steps * (_first["ranks"] if is_per_rank else 1)):
            if inner._step_count <= last:
                inner.step()

"""Accelerate in a launched script with a loop of its own: `prepare` continues where the job is.

The first DataLoader that is prepared with the model follows the job (`accelerated_loop`). Other
loaders, such as an evaluation's, are iterated whole. A schedule that the engine does not have is
stepped as often as it was. All of it follows from the number of finished steps, the batches of a
step over all ranks, and the ranks of the first generation, which the training state has.

A script that resumes from a checkpoint loads it again, and begins its loop at its step: those
finished since are left out of the loop, and the schedule is stepped as often.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from rayzero.engine.errors import ConfigError
from rayzero.engine.session import current_session
from rayzero.engine.state.metadata import capture_rng, restore_rng
from rayzero.engine.state.registry import read_value
from rayzero.workers.launch.accelerated_loop import (
    Place,
    can_read_again,
    place_of,
    set_place,
    skipping_from_place,
)
from rayzero.workers.launch.kept_schedules import apply_rates
from rayzero.workers.launch.scripted_steps import (
    ScriptedSteps,
    adapt_options,
    brings_no_config,
    check_prepare,
    clipping_where_called,
    follow_script,
    in_job,
)
from rayzero.workers.session import JobSession

_first: dict[str, int] = {}
"""`ranks` of the first generation that prepared a model, and `batches` of a step over all ranks."""
_STATE = "rayzero.accelerate"
"""Its name in the training state."""


def patch_accelerator(module: ModuleType) -> None:
    """Once, after the import of `accelerate.accelerator`. Without a job, nothing changes."""
    module.Accelerator.__init__ = _adapting_init(module.Accelerator.__init__)
    module.Accelerator.prepare = _continuing_prepare(module.Accelerator.prepare)
    module.Accelerator.save_state = _saving_once(module.Accelerator.save_state)
    module.Accelerator.load_state = _staying_load(module.Accelerator.load_state)
    module.Accelerator.clip_grad_norm_ = clipping_where_called(module.Accelerator.clip_grad_norm_)
    skip = skipping_from_place(module.skip_first_batches)
    for name in (module.__name__, "accelerate.data_loader", "accelerate"):
        vars(sys.modules[name])["skip_first_batches"] = skip


def _saving_once(save_state: Callable[..., Any]) -> Callable[..., Any]:
    """`save_state`, but what the script saves after an epoch that was finished before it was
    run again is kept: its files next to the engine's checkpoint, too. A number that Accelerate
    gives, counted from 0 again, is the next free one."""

    @wraps(save_state)
    def saving(self: Any, output_dir: str | None = None, *args: Any, **options: Any) -> Any:
        engine = getattr(current_session(), "engine", None)
        if engine is not None and engine.progress.script_lag:
            return output_dir
        if _restored_step() and self.project_configuration.automatic_checkpoint_naming:
            folder = os.path.join(self.project_dir, "checkpoints", "checkpoint_")
            while os.path.exists(f"{folder}{self.save_iteration}"):
                self.project_configuration.iteration += 1
        return save_state(self, output_dir, *args, **options)

    return saving


def _staying_load(load_state: Callable[..., Any]) -> Callable[..., Any]:
    """`load_state`, but if the engine stays at a later step, so do the schedules, and the random
    states and the count of micro-batches stay as they are. Registered objects are loaded."""

    @wraps(load_state)
    def loading(self: Any, *args: Any, **options: Any) -> None:
        session = current_session()
        engine = session.engine if isinstance(session, JobSession) else None
        if engine is None or not _restored_step():
            load_state(self, *args, **options)
            return
        rng, micro_batches = capture_rng(self.device), self.step
        load_state(self, *args, **options)
        self.step, progress = micro_batches, engine.progress
        loaded_step = progress.asked_step
        if missed := progress.step - loaded_step:
            restore_rng(rng, self.device)
            for schedule in filter(_is_ours, self._schedulers):
                apply_rates(schedule.scheduler)
                _advance(schedule, missed)
        for loader in self._dataloaders:
            if (place := place_of(loader)) is not None:
                place.missed_steps, place.loaded_step = missed, loaded_step

    return loading


def _restored_step() -> int:
    session = current_session()
    return session.restored_step if isinstance(session, JobSession) else 0


def _adapting_init(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def adapting(self: Any, *args: Any, **options: Any) -> None:
        if in_job():
            adapt_options(options)
        init(self, *args, **options)
        plugin = self.state.deepspeed_plugin
        self.rayzero_scripted = in_job() and plugin is not None and brings_no_config(options)
        if self.rayzero_scripted and plugin.is_auto("gradient_clipping"):
            plugin.deepspeed_config["gradient_clipping"] = 0.0
        session = current_session()
        if not isinstance(session, JobSession) or not session.is_resumed or plugin is None:
            return
        ranks = dist.get_world_size()
        if batches := recall_batches(session):
            if batches % ranks:
                raise ConfigError(
                    f"a step of {batches} batches over {ranks} ranks",
                    allowed=f"numbers of ranks that divide {batches}",
                    fix="--workers, or the batch size and gradient_accumulation_steps",
                )
            each = batches // ranks
            plugin.gradient_accumulation_steps = self.gradient_accumulation_steps = each
            plugin.deepspeed_config["gradient_accumulation_steps"] = each

    return adapting


def recall_batches(session: JobSession) -> int | None:
    """The batches of a step over all ranks, as the job or its training state tells."""
    if parts := session.assignment.parts:
        return parts
    _recall(session)
    return _first.get("batches")


def _recall(session: JobSession) -> None:
    """Reads `_first` in the state that the script continues from."""
    with session.resume_from() as source:
        if source is not None and session.assignment.generation > 1:
            _first.update(read_value(source, session.assignment.rank, _STATE) or {})


def _continuing_prepare(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(prepare)
    def continuing(self: Any, *args: Any, **options: Any) -> Any:
        if getattr(self, "rayzero_scripted", False):
            check_prepare(args)
        result = prepare(self, *args, **options)
        session, plugin = current_session(), self.state.deepspeed_plugin
        models = [number for number, it in enumerate(args) if isinstance(it, nn.Module)]
        if not isinstance(session, JobSession) or plugin is None or not models or len(args) < 2:
            return result
        engine = result[models[0]]
        if self.rayzero_scripted:
            follow_script(self, engine, result)
        steps = engine.gradient_accumulation_steps()
        if not _first:
            _recall(session)
        if not _first:
            ranks = dist.get_world_size()
            _first.update(ranks=ranks, batches=steps * ranks)
        if _STATE not in session.registry:
            session.registry.register(_STATE, lambda: dict(_first), _first.update)
        session.divide_step(_first["batches"])
        loaders = [it for it, given in zip(result, args, strict=True) if _is_loader(given)]
        if loaders:
            place = Place(loaders[0], engine.global_steps, steps, lambda: _recut(self))
            if isinstance(scripted := self.deepspeed_engine_wrapped, ScriptedSteps):
                place.check_stepped = scripted.check_stepped
            place.schedules[:] = [it.scheduler for it in filter(_is_ours, result)]
            set_place(loaders[0], place)
            if session.engine is not None and can_read_again(loaders[0]):
                session.loop.yields_again = True
                session.engine.survival.follow_host_loader()
        for schedule in filter(_is_ours, result):
            _continue_schedule(schedule, engine.global_steps)
        return result

    return continuing


def _is_loader(given: Any) -> bool:
    return isinstance(given, DataLoader)


def _is_ours(given: Any) -> bool:
    """Whether it is a schedule that the engine does not have."""
    return type(given).__name__ == "AcceleratedScheduler"


def _recut(accelerator: Any) -> int:
    """`count_ranks`. Returns the batches of this rank of a step."""
    count_ranks(accelerator)
    each = _first["batches"] // dist.get_world_size()
    accelerator.gradient_accumulation_steps, accelerator.step = each, 0
    return each


def count_ranks(accelerator: Any) -> None:
    """Accelerate counts the present ranks from now on, and cuts batches for them."""
    states, loaders = import_module("accelerate.state"), import_module("accelerate.data_loader")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for state in (states.PartialState(), states.AcceleratorState()):
        state.num_processes, state.process_index = ranks, rank
        state.local_process_index = int(os.environ["LOCAL_RANK"])
    for loader in accelerator._dataloaders:
        if isinstance(sampler := loader.batch_sampler, loaders.BatchSamplerShard):
            sampler.num_processes, sampler.process_index = ranks, rank


def _continue_schedule(schedule: Any, steps: int) -> None:
    """Steps it as often as it was; and from now on as often a step as on the first ranks."""
    _advance(schedule, steps)
    if not schedule.step_with_optimizer or schedule.split_batches:
        return
    skipped = schedule.optimizers

    def step(*args: Any, **options: Any) -> None:
        due = schedule.gradient_state.sync_gradients
        if due and not any(optimizer.step_was_skipped for optimizer in skipped):
            _advance(schedule, 1)

    schedule.step = step


def _steps_of(schedule: Any) -> int:
    """How often Accelerate steps it in a step."""
    return _first["ranks"] if schedule.step_with_optimizer and not schedule.split_batches else 1


def _advance(schedule: Any, steps: int) -> None:
    inner = schedule.scheduler
    last = getattr(inner, "total_steps", math.inf)  # OneCycleLR's
    with warnings.catch_warnings():  # torch's, of a schedule that is stepped before its optimizer
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for _ in range(steps * _steps_of(schedule)):
            if inner._step_count <= last:
                inner.step()

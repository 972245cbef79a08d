"""Accelerate in a launched script with a loop of its own: `prepare` goes on where the job stands.

The script begins its loops again. The first DataLoader that is prepared with the model leaves out
the finished steps: a finished epoch yields nothing, the current one the batches that are left.
Other loaders, such as an evaluation's, are iterated whole. A schedule that the engine does not have
is stepped as often as it was. All of it follows from the number of finished steps, the batches of a
step over all ranks, and the ranks of the first generation, which survivors know.

A script that resumes from a checkpoint loads it again, and begins its loop at its step: those
finished since are left out of the loop, and the schedule is stepped as often.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from rayzero.engine.comm.process_group import all_gather_objects
from rayzero.engine.errors import ConfigError
from rayzero.engine.session import current_session
from rayzero.engine.state.metadata import capture_rng, restore_rng
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
"""Of the first generation that prepared a model: `ranks`, and `batches` of a step over all ranks.
This process's, or that of a survivor."""


def patch_accelerator(module: ModuleType) -> None:
    """Once, after the import of `accelerate.accelerator`. Without a job, nothing changes."""
    module.Accelerator.__init__ = _adapting_init(module.Accelerator.__init__)
    module.Accelerator.prepare = _continuing_prepare(module.Accelerator.prepare)
    module.Accelerator.save_state = _saving_once(module.Accelerator.save_state)
    module.Accelerator.load_state = _staying_load(module.Accelerator.load_state)
    module.Accelerator.clip_grad_norm_ = clipping_where_called(module.Accelerator.clip_grad_norm_)
    skip = _skipping_from_place(module.skip_first_batches)
    for name in (module.__name__, "accelerate.data_loader", "accelerate"):
        vars(sys.modules[name])["skip_first_batches"] = skip


def _saving_once(save_state: Callable[..., Any]) -> Callable[..., Any]:
    """`save_state`, but what the script saves after an epoch that was finished before it was
    entered again is kept: its files beside the engine's checkpoint, too. A number that Accelerate
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
                inner = schedule.scheduler
                groups = inner.optimizer.param_groups
                for group, lr in zip(groups, inner.get_last_lr(), strict=True):
                    group["lr"] = lr  # a schedule restores its own position only
                _advance(schedule, missed)
        for loader in self._dataloaders:
            if (place := _place_of(loader)) is not None:
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
        if not _restored_step() or plugin is None:
            return
        _agree()
        ranks = dist.get_world_size()
        if _first and ranks != _first["now"]:
            if _first["batches"] % ranks:
                raise ConfigError(
                    f"a step of {_first['batches']} batches over {ranks} ranks",
                    allowed=f"numbers of ranks that divide {_first['batches']}",
                    fix="--workers, or the batch size and gradient_accumulation_steps",
                )
            each = _first["batches"] // ranks
            plugin.gradient_accumulation_steps = self.gradient_accumulation_steps = each
            plugin.deepspeed_config["gradient_accumulation_steps"] = each

    return adapting


def _agree() -> None:
    """Takes what a survivor knows of the first generation. Collective."""
    known = next((offer for offer in all_gather_objects(dict(_first)) if offer), {})
    _first.clear()
    _first.update(known)


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
            ranks = dist.get_world_size()
            _first.update(ranks=ranks, batches=steps * ranks, now=ranks)
        _first["now"] = dist.get_world_size()
        session.divide_step(_first["batches"])
        loaders = [it for it, given in zip(result, args, strict=True) if _is_loader(given)]
        if loaders:
            place = _Place(engine.global_steps, len(loaders[0]), steps)
            if isinstance(scripted := self.deepspeed_engine_wrapped, ScriptedSteps):
                place.check_stepped = scripted.check_stepped
            _set_place(loaders[0], place)
        for schedule in filter(_is_ours, result):
            _continue_schedule(schedule, engine.global_steps)
        return result

    return continuing


def _is_loader(given: Any) -> bool:
    return isinstance(given, DataLoader)


def _is_ours(given: Any) -> bool:
    """Whether it is a schedule that the engine does not have."""
    return type(given).__name__ == "AcceleratedScheduler"


@dataclass
class _Place:
    """Where a script's loop over a loader is.

    Attributes:
        missed_steps: finished ones that the loop has not come to.
        batches: of this rank, of an epoch.
        step_batches: of this rank, of a step.
        loaded_step: of the checkpoint that a script has loaded when it was entered again.
        check_stepped: called before each batch but the first.
    """

    missed_steps: int
    batches: int
    step_batches: int
    loaded_step: int | None = None
    check_stepped: Callable[[], None] = lambda: None

    def skipped_by_script(self, batches: int) -> int:
        """Of an epoch's batches, where the script asks for so many. It may have counted them on
        another number of ranks: the step of its checkpoint counts, if it has loaded one."""
        if self.loaded_step is None or not batches:
            return batches
        return self.loaded_step % self._steps(self.batches) * self.step_batches

    def begin_epoch(self, skipped: int) -> int | None:
        """The batches to leave out, beside those that the script itself skips; None: all."""
        steps = self._steps(self.batches - skipped)
        done = min(self.missed_steps, steps)
        self.missed_steps -= done
        is_finished = done == steps
        if (engine := getattr(current_session(), "engine", None)) is not None:
            engine.progress.script_lag = self.missed_steps if is_finished else None
        return None if is_finished else done * self.step_batches

    def _steps(self, batches: int) -> int:
        return math.ceil(batches / self.step_batches)


def _set_place(loader: Any, place: _Place, skipped: int = 0) -> None:
    """From now on the loader's iterations begin at the place. A drain ends the script where it asks
    for the batch after a step."""
    if type(loader) not in _patched:
        _patched.add(type(loader))
        type(loader).__iter__ = _continuing_iter(type(loader).__iter__)
    loader.rayzero_place = place, skipped


def _place_of(loader: Any) -> _Place | None:
    place, _ = getattr(loader, "rayzero_place", (None, 0))
    return place


_patched = set[type]()


def _continuing_iter(iterate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def continuing(self: Any) -> Iterator[Any]:
        place, skipped = getattr(self, "rayzero_place", (None, 0))
        if place is None:
            return iterate(self)
        batches = place.begin_epoch(skipped)
        rest = iterate(self) if batches == 0 else _rest(self, batches)
        return _announce_batches(rest, place.check_stepped)

    return continuing


def _skipping_from_place(skip: Callable[..., Any]) -> Callable[..., Any]:
    """`skip_first_batches`, which makes another loader."""

    @wraps(skip)
    def skipping(dataloader: Any, num_batches: int = 0) -> Any:
        place = _place_of(dataloader)
        if place is None:
            return skip(dataloader, num_batches)
        skipped = place.skipped_by_script(num_batches)
        rest = skip(dataloader, skipped)
        _set_place(rest, place, skipped)
        return rest

    return skipping


def _announce_batches(batches: Iterator[Any], check_stepped: Callable[[], None]) -> Iterator[Any]:
    for batch in batches:
        yield batch
        check_stepped()
        if (session := current_session()) is not None:
            session.on_phase("data")


def _rest(loader: Any, batches: int | None) -> Iterator[Any]:
    if batches is None:  # a sampler's generator goes on from epoch to epoch
        for _ in loader.batch_sampler:
            pass
    else:
        skip = import_module("accelerate").skip_first_batches.__wrapped__
        rest = skip(loader, batches)
        rest.iteration = loader.iteration
        yield from rest
    loader.iteration += 1


def _continue_schedule(schedule: Any, steps: int) -> None:
    """Steps it as often as it was; and from now on as often a step as on the first ranks."""
    _advance(schedule, steps)
    if _steps_of(schedule) not in (1, dist.get_world_size()):
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

"""Accelerate in a launched script with a loop of its own: `prepare` goes on where the job stands.

The script begins its loops again. The first DataLoader that is prepared with the model counts its
iterations as epochs: a finished one yields nothing, the current one the batches that are left.
Other loaders, such as an evaluation's, are iterated whole. A schedule that the engine does not have
is stepped as often as it was. All of it follows from the number of finished steps, the batches of a
step over all ranks, and the ranks of the first generation, which survivors know.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
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
from rayzero.workers.session import JobSession

_first: dict[str, int] = {}
"""Of the first generation that prepared a model: `ranks`, and `batches` of a step over all ranks.
This process's, or that of a survivor."""


def patch_accelerator(module: ModuleType) -> None:
    """Once, after the import of `accelerate.accelerator`. Without a job, nothing changes."""
    module.Accelerator.__init__ = _adapting_init(module.Accelerator.__init__)
    module.Accelerator.prepare = _continuing_prepare(module.Accelerator.prepare)
    module.Accelerator.save_state = _saving_once(module.Accelerator.save_state)


def _saving_once(save_state: Callable[..., Any]) -> Callable[..., Any]:
    """`save_state`, but what the script saves after an epoch that was finished before it was
    entered again is kept: its files beside the engine's checkpoint, too."""

    @wraps(save_state)
    def saving(self: Any, output_dir: str | None = None, *args: Any, **options: Any) -> Any:
        engine = getattr(current_session(), "engine", None)
        if output_dir is not None and engine is not None and engine.progress.script_lag:
            return output_dir
        return save_state(self, output_dir, *args, **options)

    return saving


def _restored_step() -> int:
    session = current_session()
    return session.restored_step if isinstance(session, JobSession) else 0


def _adapting_init(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def adapting(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        plugin = self.state.deepspeed_plugin
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
        result = prepare(self, *args, **options)
        session, plugin = current_session(), self.state.deepspeed_plugin
        models = [number for number, it in enumerate(args) if isinstance(it, nn.Module)]
        if not isinstance(session, JobSession) or plugin is None or not models or len(args) < 2:
            return result
        engine = result[models[0]]
        steps = engine.gradient_accumulation_steps()
        if not _first:
            ranks = dist.get_world_size()
            _first.update(ranks=ranks, batches=steps * ranks, now=ranks)
        _first["now"] = dist.get_world_size()
        session.divide_step(_first["batches"])
        loaders = [it for it, given in zip(result, args, strict=True) if _is_loader(given)]
        if loaders:
            steps_per_epoch = math.ceil(len(loaders[0]) / steps)
            epoch, done = divmod(engine.global_steps, steps_per_epoch)
            _continue_loader(loaders[0], epoch, done * steps)
        for schedule in result:
            if type(schedule).__name__ == "AcceleratedScheduler":
                _continue_schedule(schedule, engine.global_steps)
        return result

    return continuing


def _is_loader(given: Any) -> bool:
    return isinstance(given, DataLoader)


def _continue_loader(loader: Any, epochs: int, batches: int) -> None:
    """Makes its first `epochs` iterations empty, and the next one begin after `batches`. A drain
    ends the script where it asks for the batch after a step."""
    if type(loader) not in _patched:
        _patched.add(type(loader))
        type(loader).__iter__ = _continuing_iter(type(loader).__iter__)
    loader.rayzero_skips = [*[None] * epochs, batches]


_patched = set[type]()


def _continuing_iter(iterate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """`iterate`, but what `rayzero_skips` says: None for nothing, or the batches to leave out."""

    def continuing(self: Any) -> Iterator[Any]:
        skips = getattr(self, "rayzero_skips", None)
        if skips is None:
            return iterate(self)
        batches = skips.pop(0) if skips else 0
        if (engine := getattr(current_session(), "engine", None)) is not None:
            engine.progress.script_lag = len(skips) if batches is None and skips != [0] else None
        return _announce_batches(iterate(self) if batches == 0 else _rest(self, batches))

    return continuing


def _announce_batches(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        yield batch
        if (session := current_session()) is not None:
            session.on_phase("data")


def _rest(loader: Any, batches: int | None) -> Iterator[Any]:
    if batches is None:  # a sampler's generator goes on from epoch to epoch
        for _ in loader.batch_sampler:
            pass
    else:
        rest = import_module("accelerate").skip_first_batches(loader, batches)
        rest.iteration = loader.iteration
        yield from rest
    loader.iteration += 1


def _continue_schedule(schedule: Any, steps: int) -> None:
    """Steps it as often as it was; and from now on as often a step as on the first ranks."""
    inner, ranks = schedule.scheduler, _first["ranks"]
    each = ranks if schedule.step_with_optimizer and not schedule.split_batches else 1
    last = getattr(inner, "total_steps", math.inf)  # OneCycleLR's

    def advance() -> None:
        for _ in range(each):
            if inner._step_count <= last:
                inner.step()

    with warnings.catch_warnings():  # torch's, of a schedule that is stepped before its optimizer
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for _ in range(steps):
            advance()
    if each != dist.get_world_size() and each > 1:
        skipped = schedule.optimizers

        def step(*args: Any, **options: Any) -> None:
            due = schedule.gradient_state.sync_gradients
            if due and not any(optimizer.step_was_skipped for optimizer in skipped):
                advance()

        schedule.step = step

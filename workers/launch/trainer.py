"""transformers' Trainer in a launched script: wrappers around its public methods (`trainer_run`).

Without a job, nothing changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from rayzero.engine.errors import CollectiveError, ConfigError
from rayzero.engine.session import current_session
from rayzero.workers.launch.accelerated import recall_batches
from rayzero.workers.launch.scripted_steps import in_job
from rayzero.workers.launch.trainer_run import TrainerEvents, TrainerRun
from rayzero.workers.session import JobSession


def patch_trainer(module: ModuleType) -> None:
    """Once, after the import of `transformers.trainer`."""
    trainer, arguments = module.Trainer, module.TrainingArguments
    trainer.train = _training_in_job(trainer.train, module)
    trainer.set_initial_training_values = _knowing_epoch(trainer.set_initial_training_values)
    trainer.get_batch_samples = _reading_steps(trainer.get_batch_samples)
    trainer.training_step = _running_steps(trainer.training_step)
    trainer.evaluation_loop = _evaluating_before_training(trainer.evaluation_loop)
    load = module.deepspeed_load_checkpoint
    module.deepspeed_load_checkpoint = _staying_load(load)  # type: ignore[attr-defined]
    arguments.__post_init__ = _adapting_batches(arguments.__post_init__)


_runs: list[TrainerRun] = []
"""The calls of `train` that are running."""


def _run_of(trainer: Any) -> TrainerRun | None:
    return getattr(trainer, "rayzero_run", None)


def _training_in_job(train: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    callback_type = type("_Callback", (TrainerEvents, module.TrainerCallback), {})

    @wraps(train)
    def training(self: Any, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        session = current_session()
        if not isinstance(session, JobSession):
            return train(self, resume_from_checkpoint, *args, **options)
        run = TrainerRun(self, session, module.Trainer)
        callback = callback_type(run, self)
        self.rayzero_run = run
        self.add_callback(callback)
        _runs.append(run)
        try:
            with run.resumption() as folder:
                return train(self, folder or resume_from_checkpoint, *args, **options)
        finally:
            _runs.remove(run)
            self.rayzero_run = None
            self.remove_callback(callback)

    return training


def _knowing_epoch(values_of: Callable[..., Any]) -> Callable[..., Any]:
    """`set_initial_training_values`, which computes the number of steps of an epoch."""

    @wraps(values_of)
    def knowing(self: Any, *args: Any, **options: Any) -> Any:
        values = values_of(self, *args, **options)
        if (run := _run_of(self)) is not None:
            run.steps_per_epoch = values[1]
        return values

    return knowing


def _reading_steps(read: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(read)
    def reading(self: Any, iterator: Any, count: int, device: Any) -> Any:
        if (run := _run_of(self)) is None:
            return read(self, iterator, count, device)
        return run.read(read, iterator, count, device)

    return reading


def _running_steps(run_step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run_step)
    def running(self: Any, model: Any, inputs: Any, items: Any = None) -> Any:
        if (run := _run_of(self)) is None or run.steps is None:
            return run_step(self, model, inputs, items)
        return run.steps.run(inputs, items)

    return running


def _staying_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """`deepspeed_load_checkpoint`, but for a folder that `train` was given here the engine stays
    as it is."""

    @wraps(load)
    def loading(engine: Any, folder: Any, *args: Any, **options: Any) -> Any:
        ours = [run for run in _runs if run.folder == folder]
        if not ours:
            return load(engine, folder, *args, **options)
        return ours[0].load_engine()

    return loading


def _evaluating_before_training(loop: Callable[..., Any]) -> Callable[..., Any]:
    """`evaluation_loop`, also before `train` in a script without a DeepSpeed config: Trainer over
    DeepSpeed refuses that below stage 3, where each rank has the whole model. Raises
    CollectiveError if a rank is lost meanwhile, whose part of the metrics is missing."""

    @wraps(loop)
    def evaluating(self: Any, *args: Any, **options: Any) -> Any:
        result = evaluate(self, *args, **options)
        run = _run_of(self)
        if run is not None and run.steps is not None and run.steps.broken:
            raise CollectiveError(run.steps.broken)
        return result

    def evaluate(self: Any, *args: Any, **options: Any) -> Any:
        is_own = not self.is_deepspeed_enabled or self.deepspeed is not None or self.args.deepspeed
        if not in_job() or is_own or self.accelerator.state.deepspeed_plugin.zero_stage == 3:
            return loop(self, *args, **options)
        self.is_deepspeed_enabled = False
        try:
            return loop(self, *args, **options)
        finally:
            self.is_deepspeed_enabled = True

    return evaluating


def _adapting_batches(post_init: Callable[..., None]) -> Callable[..., None]:
    """`TrainingArguments.__post_init__`: a step has as many samples as on the first ranks."""

    @wraps(post_init)
    def adapting(self: Any, *args: Any, **options: Any) -> None:
        session = current_session()
        batches = None
        if isinstance(session, JobSession) and session.is_resumed:
            batches = recall_batches(session)
        if batches is not None:
            ranks = int(os.environ["WORLD_SIZE"])
            if batches % ranks:
                raise ConfigError(
                    f"Trainer's step of {batches} micro-batches over {ranks} ranks",
                    allowed=f"numbers of ranks that divide {batches}",
                    fix="--workers, or per_device_train_batch_size and gradient_accumulation_steps",
                )
            self.gradient_accumulation_steps = batches // ranks
        post_init(self, *args, **options)

    return adapting

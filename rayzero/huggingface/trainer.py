"""transformers' Trainer in a launched script: `train` begins at the job's step, and a callback
follows its events.

A Trainer whose job has finished steps resumes from a folder, as from a checkpoint of its own. The
folder has the TrainerState that another Trainer has registered with the training state
(`trainer_state`), or else a TrainerState with only the number of finished steps, without a log. The
engine, the schedule and the random states continue from the job's memory.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from rayzero.engine.errors import CollectiveError, ConfigError
from rayzero.engine.state.metadata import capture_rng, restore_rng
from rayzero.engine.state.registry import read_value
from rayzero.huggingface.accelerator import first_ranks, own_batches
from rayzero.huggingface.streams import (
    check_first_batch,
    check_train_dataset,
    check_training_data,
    choose_sampler,
)
from rayzero.huggingface.trainer_state import (
    NAME,
    Recorder,
    export_callbacks,
    load_schedule,
    state_attributes,
)
from rayzero.huggingface.trainer_steps import TrainerSteps, can_follow
from rayzero.workers.epoch_calls import NOTES_PREFIX
from rayzero.workers.launch.adapters import Original, wrap
from rayzero.workers.session import JobSession


def patch_trainer(module: ModuleType) -> None:
    """Called after the import of `transformers.trainer`."""
    trainer = module.Trainer
    run_type = type("RayzeroRun", (TrainerRun, module.TrainerCallback), {})
    wrap(trainer, "__init__", check_train_dataset)
    wrap(trainer, trainer._get_train_sampler.__name__, choose_sampler)
    wrap(trainer, "get_train_dataloader", _get_loader)
    wrap(trainer, "train", partial(_train, run_type))
    wrap(trainer, "get_batch_samples", _read)
    wrap(trainer, "training_step", _run_step)
    wrap(trainer, "evaluation_loop", _evaluate)
    wrap(module, "deepspeed_load_checkpoint", _load_engine)
    wrap(module.TrainingArguments, "__post_init__", _adapt_batches)


_runs: list[TrainerRun] = []
"""The running call of `train`, or the last one. Its Trainer's state is that of the job."""


def _run_of(trainer: Any) -> TrainerRun | None:
    return getattr(trainer, "rayzero_run", None)


def _train(
    run_type: type[TrainerRun],
    session: JobSession,
    train: Original,
    trainer: Any,
    resume_from_checkpoint: Any = None,
    *args: Any,
    **options: Any,
) -> Any:
    run = trainer.rayzero_run = run_type(trainer, session)
    _runs[:] = [run]
    if NAME not in session.registry:
        session.registry.register(NAME, lambda: _runs[0].recorder.state(), lambda _: None)
    trainer.add_callback(run)
    try:
        with run.resumption() as folder:
            return train(trainer, folder or resume_from_checkpoint, *args, **options)
    finally:
        trainer.rayzero_run = None
        trainer.remove_callback(run)


def _read(
    _: JobSession, read: Original, trainer: Any, iterator: Any, count: int, device: Any
) -> Any:
    """Replaces `get_batch_samples`, which reads nothing when training is over."""
    if (run := _run_of(trainer)) is None:
        return read(trainer, iterator, count, device)
    if run.is_over:
        return [], None
    if run.steps is None:
        found = read(trainer, iterator, count, device)
        if run.is_first_read:
            check_first_batch(found[0], trainer)
    else:
        found = run.steps.read(iterator, count)
    run.is_first_read = False
    run.restore_rng()
    return found


def _get_loader(session: JobSession, get: Original, trainer: Any) -> Any:
    """Replaces `get_train_dataloader`."""
    loader = get(trainer)
    check_training_data(session, loader, first_ranks(session))
    return loader


def _run_step(
    _: JobSession, run_step: Original, trainer: Any, model: Any, inputs: Any, items: Any = None
) -> Any:
    """Replaces `training_step`."""
    if (run := _run_of(trainer)) is None or run.steps is None:
        return run_step(trainer, model, inputs, items)
    return run.steps.run(inputs, items)


def _load_engine(
    _: JobSession, load: Original, engine: Any, folder: Any, *args: Any, **options: Any
) -> Any:
    """Replaces `deepspeed_load_checkpoint`. The engine stays as it is if the folder is that of
    `TrainerRun`."""
    if not _runs or folder is None or _runs[0].folder != folder:
        return load(engine, folder, *args, **options)
    return _runs[0].load_engine()


def _evaluate(_: JobSession, loop: Original, trainer: Any, *args: Any, **options: Any) -> Any:
    """Replaces `evaluation_loop`. A script without a DeepSpeed config may evaluate before `train`
    below stage 3, where each rank has the whole model; Trainer over DeepSpeed refuses that. Raises
    CollectiveError if a rank is lost meanwhile, since its part of the metrics is missing."""
    given = trainer.is_deepspeed_enabled
    is_own = not given or trainer.deepspeed is not None or trainer.args.deepspeed
    if not is_own and trainer.accelerator.state.deepspeed_plugin.zero_stage != 3:
        trainer.is_deepspeed_enabled = False
    try:
        result = loop(trainer, *args, **options)
    finally:
        trainer.is_deepspeed_enabled = given
    run = _run_of(trainer)
    if run is not None and run.steps is not None and (reason := run.steps.broken):
        raise CollectiveError(reason)
    return result


def _adapt_batches(
    session: JobSession, post_init: Original, arguments: Any, *args: Any, **options: Any
) -> None:
    """Replaces `TrainingArguments.__post_init__`: a step keeps the samples of the first ranks."""
    batches = own_batches(session, "per_device_train_batch_size and gradient_accumulation_steps")
    if batches is not None:
        arguments.gradient_accumulation_steps = batches
    post_init(arguments, *args, **options)


class TrainerRun:
    """One call of `train`: a transformers callback, called after all other callbacks. Used in the
    training thread.

    Attributes:
        recorder: records the Trainer's state.
        steps: runs the Trainer's steps; None if steps cannot be run again.
        folder: from which Trainer resumes; None at the start of a job.
        is_over: training ended with a step that was finished before this call of `train`.
        is_first_read: the job had begun before, and this call has read nothing yet.
    """

    def __init__(self, trainer: Any, session: JobSession) -> None:
        self.recorder = Recorder(trainer)
        self.steps: TrainerSteps | None = None
        self.folder: str | None = None
        self.is_over = False
        self.is_first_read = session.is_resumed
        self._trainer = trainer
        self._session = session
        self._found = _find_state(session) if session.is_resumed else None
        self._restored_rng: dict[str, Any] | None = None  # of the restored step, until it is set
        self._other_callbacks: list[Any] = []
        session.divide_step(self.recorder.parts)
        session.loop.tell = self.recorder.tell

    @contextmanager
    def resumption(self) -> Iterator[str | None]:
        """Yields the folder from which Trainer resumes; None at the start of a job."""
        if not self._session.is_resumed:
            yield None
            return
        trainer, found = self._trainer, self._found
        args = trainer.args
        state = import_module("transformers").TrainerState(train_batch_size=args.train_batch_size)
        if found is not None:
            vars(state).update(state_attributes(found))
        else:
            vars(state)["stateful_callbacks"] = export_callbacks(trainer)
        state.global_step = self._session.restored_step
        args.eval_on_start = args.ignore_data_skip = False
        args.restore_callback_states_from_checkpoint = found is not None
        with tempfile.TemporaryDirectory(prefix="rz-trainer-") as self.folder:
            state.save_to_json(os.path.join(self.folder, "trainer_state.json"))
            yield self.folder

    def load_engine(self) -> None:
        """Called where Trainer loads the engine from the folder, before the schedule. The engine
        has restored itself and its random states, so this only writes a schedule to load."""
        trainer, folder = self._trainer, self.folder
        engine = trainer.model_wrapped
        self._restored_rng = capture_rng(engine.device)
        if engine.lr_scheduler is not None or folder is None:
            return  # the engine has restored the schedule
        if self._found is not None:
            load_schedule(trainer, self._found["schedule"])
        else:
            for _ in range(engine.global_steps):
                trainer.lr_scheduler.step()
        torch.save(trainer.lr_scheduler.state_dict(), os.path.join(folder, "scheduler.pt"))

    def restore_rng(self) -> None:
        """Sets the random states of the restored step again, once."""
        if self._restored_rng is not None:
            restore_rng(self._restored_rng, self._trainer.model_wrapped.device)
            self._restored_rng = None

    def on_train_begin(self, *args: Any, **options: Any) -> None:
        """Does first what Trainer does after the last finished step, with the random states of that
        step's end; the random states after that are those with which the next step begins. Lets
        `train` continue after faults and resizes, if its steps can be run again."""
        trainer, session = self._trainer, self._session
        found, self._found = self._found, None
        loader = trainer.callback_handler.train_dataloader
        values = trainer.set_initial_training_values(trainer.args, loader)
        self.recorder.steps_per_epoch = values[1]
        shutil.rmtree(str(self.folder), ignore_errors=True)  # a killed process would leave it
        if session.is_resumed:
            trainer.state.compute_steps(trainer.args, trainer.state.max_steps)
        if found is not None:
            self.recorder.continue_from(found)
            has_rng = self._restored_rng is not None
            self.restore_rng()
            self._end_step(found)
            if has_rng:
                self._restored_rng = capture_rng(trainer.model_wrapped.device)
        state, control = trainer.state, trainer.control
        if session.is_resumed and _ends(state, control):
            self.is_over = control.should_training_stop = True
            # The loop has reached its last step, after which it may load the best model.
            trainer.model_wrapped.progress.script_lag = 0
        if session.engine and can_follow(trainer):
            session.follow_loop(session.engine)
            self.steps = TrainerSteps(trainer, session, session.engine, self.recorder)

    def _end_step(self, found: dict[str, Any]) -> None:
        trainer = self._trainer
        state, control = trainer.state, trainer.control
        steps, handler = found["steps_per_epoch"], trainer.callback_handler
        if found["step_end_due"]:
            state.epoch = state.global_step / steps
            if found["schedule"] is not None:
                trainer.lr_scheduler.step()
            handler.on_step_end(trainer.args, state, control)
        else:
            vars(control).update(found["control"])
        self._log_save_evaluate()
        at_end = steps and (_ends(state, control) or state.global_step % steps == 0)
        if at_end and found["ended_epoch"] != state.global_step:
            handler.on_epoch_end(trainer.args, state, control)
            self._log_save_evaluate()

    def _log_save_evaluate(self) -> None:
        trainer = self._trainer
        engine, epoch = trainer.model_wrapped, int(trainer.state.epoch or 0)
        norm = engine.get_global_grad_norm()
        loss = trainer._tr_loss
        trainer._maybe_log_save_evaluate(loss, norm, engine, None, epoch, None, time.time())

    def on_epoch_begin(self, *args: Any, **options: Any) -> None:
        if self.is_over:  # the epoch is empty: other callbacks do not get its end
            handler = self._trainer.callback_handler
            self._other_callbacks, handler.callbacks = handler.callbacks, [self]
        elif self._trainer.state.global_step % self.recorder.steps_per_epoch == 0:
            self.restore_rng()  # otherwise restored after the batches that Trainer skips

    def on_step_begin(self, *args: Any, **options: Any) -> None:
        if len(self._session.engines) > 1:
            raise ConfigError(
                "a script trains another engine in addition to its Trainer's, as in a callback",
                allowed="one engine that trains, and any number that only evaluate",
                fix="train the other model without an engine (a torch optimizer, on each rank), or "
                "write the loop with Accelerate: accelerator.prepare takes several models",
            )
        self.recorder.step_begins()

    def on_optimizer_step(self, *args: Any, **options: Any) -> None:
        self.recorder.step_is_done()

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self._leave_out_what_is_done(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        if self.is_over:
            self._trainer.callback_handler.callbacks = self._other_callbacks
        self.recorder.epoch_ends()
        self._leave_out_what_is_done(control)

    def _leave_out_what_is_done(self, control: Any) -> None:
        if self.is_over or (self.steps is not None and self.steps.is_quiet):
            control.should_log = control.should_evaluate = control.should_save = False


def _ends(state: Any, control: Any) -> bool:
    """Returns whether training ends with the present step."""
    return bool(control.should_training_stop or state.global_step >= state.max_steps)


def _find_state(session: JobSession) -> dict[str, Any] | None:
    """Returns the `Recorder.state` of an earlier Trainer after the restored step; None if a
    survivor sends it later, or there is none."""
    assignment = session.assignment
    if assignment.survivors_stay:
        return None
    found: dict[str, Any] | None = None
    if assignment.notes and not assignment.notes.startswith(NOTES_PREFIX):
        found = pickle.loads(assignment.notes)
    else:
        with session.open_source() as source:
            if source is not None:
                found = read_value(source, assignment.rank, NAME)
    return found

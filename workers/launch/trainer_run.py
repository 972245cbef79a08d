"""One call of `Trainer.train` in a job: where it begins, and what follows its events.

A Trainer whose job has finished steps resumes from a folder, as from a checkpoint of its own. The
folder has the TrainerState that another Trainer has registered with the training state
(`trainer_state`), or one of the finished steps alone, without a log. The engine, the schedule and
the random states continue from the job's memory.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from rayzero.engine.state.metadata import capture_rng, restore_rng
from rayzero.engine.state.registry import read_value
from rayzero.workers.launch.trainer_state import (
    NAME,
    Recorder,
    export_callbacks,
    load_schedule,
    state_attributes,
)
from rayzero.workers.launch.trainer_steps import TrainerSteps, can_follow
from rayzero.workers.session import JobSession

_recorders: list[Recorder] = []
"""That of the Trainer that trains last."""


class TrainerRun:
    """Used in the training thread.

    Args:
        base: transformers' Trainer, with our wrappers around its methods.

    Attributes:
        steps: runs the Trainer's steps; None where they cannot be run again.
        folder: from which Trainer resumes; None at the start of a job.
        steps_per_epoch: as Trainer counts them; 0 before it has.
        is_over: training ended with a step that was finished before this call of `train`.
    """

    def __init__(self, trainer: Any, session: JobSession, base: type) -> None:
        self.steps: TrainerSteps | None = None
        self.folder: str | None = None
        self.steps_per_epoch = 0
        self.is_over = False
        self._trainer = trainer
        self._session = session
        self._base = base
        self._found = _find_state(session) if session.is_resumed else None
        session.divide_step(trainer.args.gradient_accumulation_steps * dist.get_world_size())
        self.recorder = Recorder(trainer)
        _recorders[:] = [self.recorder]
        session.loop.tell = self.recorder.tell
        if NAME not in session.registry:
            session.registry.register(NAME, lambda: _recorders[0].state(), lambda _: None)

    @contextmanager
    def resumption(self) -> Iterator[str | None]:
        """Within it, the folder from which Trainer resumes exists; None at the start of a job."""
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
        """Called where Trainer loads the engine from the folder, and the schedule after it: the
        engine has restored itself, and these are its random states."""
        trainer, folder = self._trainer, self.folder
        engine = trainer.model_wrapped
        self.recorder.restored_rng = capture_rng(engine.device)
        if engine.lr_scheduler is not None or folder is None:
            return  # the engine has restored the schedule
        if self._found is not None:
            load_schedule(trainer, self._found)
        else:
            for _ in range(engine.global_steps):
                trainer.lr_scheduler.step()
        torch.save(trainer.lr_scheduler.state_dict(), os.path.join(folder, "scheduler.pt"))

    def read(self, read: Any, iterator: Any, count: int, device: Any) -> tuple[list[Any], Any]:
        """Does what `get_batch_samples` does, which is given as `read`. Nothing is left to read
        where training is over."""
        if self.is_over:
            return [], None
        if self.steps is not None:
            found = self.steps.read(iterator, count)
        else:
            found = read(self._trainer, iterator, count, device)
        self.recorder.restore_rng()
        return found

    def follow_ranks(self) -> None:
        """Lets `train` continue after faults and resizes, if its steps can be run again."""
        session, trainer = self._session, self._trainer
        if session.engine and can_follow(trainer, self._base):
            session.loop.yields_again = True
            session.engine.survival.follow_host_loader()
            self.steps = TrainerSteps(trainer, session, session.engine, self.recorder, self._base)

    def finish_step(self) -> None:
        """Continues after the last finished step, with what Trainer does for it. Its random states
        are those of the step's end, and afterwards those with which the next step begins."""
        trainer, recorder = self._trainer, self.recorder
        found, self._found = self._found, None
        shutil.rmtree(str(self.folder), ignore_errors=True)  # a killed process would leave it
        if self._session.is_resumed:
            trainer.state.compute_steps(trainer.args, trainer.state.max_steps)
        if found is not None:
            recorder.continue_from(found)
            device, rng = trainer.model_wrapped.device, recorder.restored_rng
            if rng is not None:
                restore_rng(rng, device)
            self._end_step(found)
            if rng is not None:
                recorder.restored_rng = capture_rng(device)
        self.check_over()

    def _end_step(self, found: dict[str, Any]) -> None:
        trainer = self._trainer
        state = trainer.state
        control = trainer.control
        steps, handler = found["steps_per_epoch"], trainer.callback_handler
        if found["step_end_due"]:
            state.epoch = state.global_step / steps
            if found["schedule"] is not None:
                trainer.lr_scheduler.step()
            handler.on_step_end(trainer.args, state, control)
        else:
            vars(control).update(found["control"])
        self._log_save_evaluate()
        is_last = control.should_training_stop or state.global_step >= state.max_steps
        at_end = steps and (is_last or state.global_step % steps == 0)
        if at_end and found["ended_epoch"] != state.global_step:
            handler.on_epoch_end(trainer.args, state, control)
            self._log_save_evaluate()

    def _log_save_evaluate(self) -> None:
        trainer = self._trainer
        engine, epoch = trainer.model_wrapped, int(trainer.state.epoch or 0)
        norm = engine.get_global_grad_norm()
        loss = trainer._tr_loss
        trainer._maybe_log_save_evaluate(loss, norm, engine, None, epoch, None, time.time())

    def check_over(self) -> None:
        """Finds out whether training is over, where it has not run a step in this call."""
        state, control = self._trainer.state, self._trainer.control
        over = control.should_training_stop or state.global_step >= state.max_steps
        if over and self._session.is_resumed:
            self.is_over = control.should_training_stop = True
            # The loop is where its last step was: it may load the best model.
            self._trainer.model_wrapped.progress.script_lag = 0


def _find_state(session: JobSession) -> dict[str, Any] | None:
    """Returns the `Recorder.state` of an earlier Trainer after the restored step; None where a
    survivor sends it later, or there is none."""
    assignment = session.assignment
    if assignment.survivors_stay:
        return None
    found: dict[str, Any] | None = pickle.loads(assignment.notes) if assignment.notes else None
    if found is None:
        with session.resume_from() as source:
            if source is not None:
                found = read_value(source, assignment.rank, NAME)
    return found


class TrainerEvents:
    """Follows the events of a call of `train`: a callback of transformers, after all others."""

    def __init__(self, run: TrainerRun, trainer: Any) -> None:
        self._run = run
        self._trainer = trainer
        self._others: list[Any] = []

    def on_train_begin(self, *args: Any, **options: Any) -> None:
        self._run.finish_step()
        self._run.follow_ranks()

    def on_epoch_begin(self, *args: Any, **options: Any) -> None:
        recorder, steps = self._run.recorder, self._run.steps_per_epoch
        recorder.epoch_begins(steps)
        if self._run.is_over:  # an empty epoch: its end is not reported
            handler = self._trainer.callback_handler
            self._others, handler.callbacks = handler.callbacks, [self]
        elif self._trainer.state.global_step % steps == 0:
            recorder.restore_rng()  # else after the batches that Trainer skips

    def on_step_begin(self, *args: Any, **options: Any) -> None:
        self._run.recorder.step_begins()

    def on_optimizer_step(self, *args: Any, **options: Any) -> None:
        self._run.recorder.step_is_done()

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self._leave_out_what_is_done(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        if self._run.is_over:
            self._trainer.callback_handler.callbacks = self._others
        self._run.recorder.epoch_ends()
        self._leave_out_what_is_done(control)

    def _leave_out_what_is_done(self, control: Any) -> None:
        steps = self._run.steps
        if self._run.is_over or (steps is not None and steps.is_quiet):
            control.should_log = control.should_evaluate = control.should_save = False

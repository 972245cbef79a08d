"""transformers' Trainer in a launched script: `train` goes on at the step where the job stands.

Trainer's own resumption does most of it: it skips used batches, and restores callbacks and its log.
We give it a folder with a `TrainerState`; the engine's state, the schedule and the random states
come from the job's memory, where the `TrainerState` is registered (`trainer_state`). In a state
that has none it is made of the number of finished steps, without a log.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch.distributed as dist

from rayzero.engine.errors import CollectiveError, ConfigError
from rayzero.engine.session import current_session
from rayzero.engine.state.metadata import capture_rng, restore_rng
from rayzero.engine.state.registry import read_value
from rayzero.workers.launch.accelerated import recall_batches
from rayzero.workers.launch.scripted_steps import in_job
from rayzero.workers.launch.trainer_state import (
    NAME,
    Recorder,
    export_callbacks,
    load_schedule,
    state_attributes,
)
from rayzero.workers.launch.trainer_steps import TrainerSteps, can_follow
from rayzero.workers.session import JobSession

_FOLDER_PREFIX = "rz-trainer-"
_recorders: list[Recorder] = []
"""That of the Trainer that trains last."""


def patch_trainer(module: ModuleType) -> None:
    """Once, after the import of `transformers.trainer`. Without a job, nothing changes."""
    trainer, arguments = module.Trainer, module.TrainingArguments
    trainer.train = _resuming_train(trainer.train)
    trainer._inner_training_loop = _keeping_loop(trainer._inner_training_loop, module)
    trainer.get_batch_samples = _reading_steps(trainer.get_batch_samples)
    trainer.training_step = _running_steps(trainer.training_step)
    trainer._init_training_state = _computing_steps(trainer._init_training_state)
    trainer._run_epoch = _ending_epoch(trainer._run_epoch)
    trainer._load_rng_state = _unless_ours(trainer._load_rng_state, _restore_rng)
    load = trainer._load_optimizer_and_scheduler
    trainer._load_optimizer_and_scheduler = _unless_ours(load, _restore_schedule)
    loaded = module.deepspeed_load_checkpoint
    module.deepspeed_load_checkpoint = _unless_ours(loaded, _keep_rng)  # type: ignore[attr-defined]
    trainer._load_best_model = _after_training(trainer._load_best_model)
    trainer.evaluation_loop = _evaluating_before_training(trainer.evaluation_loop)
    arguments.__post_init__ = _adapting_batches(arguments.__post_init__)


def _restored_session() -> JobSession | None:
    """The job's session, in a generation that does not start from nothing."""
    session = current_session()
    return session if isinstance(session, JobSession) and session.is_resumed else None


def _adapting_batches(post_init: Callable[..., None]) -> Callable[..., None]:
    @wraps(post_init)
    def adapting(self: Any, *args: Any, **options: Any) -> None:
        session = _restored_session()
        if session is not None and (batches := recall_batches(session)) is not None:
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


def _resuming_train(train: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(train)
    def resuming(self: Any, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        session = _restored_session()
        if session is None:
            return train(self, resume_from_checkpoint, *args, **options)
        from transformers import TrainerState

        state = TrainerState(train_batch_size=self.args.train_batch_size)
        found = self._rayzero_found = _find_state(session)
        if found is not None:
            vars(state).update(state_attributes(found))
        else:
            vars(state)["stateful_callbacks"] = export_callbacks(self)
        state.global_step = session.restored_step
        self.args.eval_on_start = self.args.ignore_data_skip = False
        self.args.restore_callback_states_from_checkpoint = found is not None
        with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX) as folder:
            self._rayzero_folder = folder
            state.save_to_json(os.path.join(folder, "trainer_state.json"))
            return train(self, folder, *args, **options)

    return resuming


def _find_state(session: JobSession) -> dict[str, Any] | None:
    """What a Trainer before this one knew after the restored step; None where a survivor tells it
    later, or nobody knows."""
    assignment = session.assignment
    if assignment.survivors_stay:
        return None
    found: dict[str, Any] | None = pickle.loads(assignment.notes) if assignment.notes else None
    if found is None:
        with session.resume_from() as source:
            if source is not None:
                found = read_value(source, assignment.rank, NAME)
    return found


def _computing_steps(init: Callable[..., Any]) -> Callable[..., Any]:
    """The intervals of log, evaluation and save from the arguments, also where no snapshot is."""

    @wraps(init)
    def computing(self: Any, max_steps: int, *args: Any, **options: Any) -> Any:
        result = init(self, max_steps, *args, **options)
        if _restored_session() is not None:
            self.state.compute_steps(self.args, max_steps)
        return result

    return computing


def _keeping_loop(loop: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    class KeepState(module.TrainerCallback):  # type: ignore[name-defined,misc]
        """Announces the Trainer's events to its recorder."""

        def __init__(self, trainer: Any) -> None:
            self.trainer, self.recorder = trainer, trainer._rayzero_recorder

        def on_train_begin(self, *args: Any, **options: Any) -> None:
            found = getattr(self.trainer, "_rayzero_found", None)
            self.trainer._rayzero_found = None
            if folder := getattr(self.trainer, "_rayzero_folder", None):
                shutil.rmtree(folder, ignore_errors=True)  # a killed process would leave it
            _finish_step(self.trainer, found)
            _follow_ranks(self.trainer, self.recorder, module.Trainer)

        def on_step_begin(self, *args: Any, **options: Any) -> None:
            self.recorder.step_begins()

        def on_step_end(self, *args: Any, **options: Any) -> None:
            self.leave_out_what_is_done(args[2])

        def on_epoch_end(self, *args: Any, **options: Any) -> None:
            self.recorder.epoch_ends()
            self.leave_out_what_is_done(args[2])

        def leave_out_what_is_done(self, control: Any) -> None:
            steps = self.trainer._rayzero_steps
            if steps is not None and steps.is_quiet:
                control.should_log = control.should_evaluate = control.should_save = False

        def on_optimizer_step(self, *args: Any, **options: Any) -> None:
            self.recorder.step_is_done()

    @wraps(loop)
    def keeping(self: Any, *args: Any, **options: Any) -> Any:
        session = current_session()
        if not isinstance(session, JobSession):
            return loop(self, *args, **options)
        session.divide_step(self.args.gradient_accumulation_steps * dist.get_world_size())
        self._rayzero_recorder, self._rayzero_steps = Recorder(self), None
        _recorders[:] = [self._rayzero_recorder]
        session.loop.tell = self._rayzero_recorder.tell
        if NAME not in session.registry:
            session.registry.register(NAME, lambda: _recorders[0].state(), lambda _: None)
        self.add_callback(callback := KeepState(self))
        try:
            return loop(self, *args, **options)
        finally:
            self._rayzero_steps = None
            self.remove_callback(callback)

    return keeping


def _follow_ranks(trainer: Any, recorder: Recorder, base: type) -> None:
    """Lets `train` go on after faults and resizes, if its steps can be run again."""
    session = current_session()
    if isinstance(session, JobSession) and session.engine and can_follow(trainer, base):
        session.loop.yields_again = True
        session.engine.survival.follow_host_loader()
        trainer._rayzero_steps = TrainerSteps(trainer, session, session.engine, recorder, base)


def _reading_steps(read: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(read)
    def reading(self: Any, iterator: Any, count: int, device: Any) -> Any:
        steps = getattr(self, "_rayzero_steps", None)
        if steps is None:
            return read(self, iterator, count, device)
        return steps.read(iterator, count)

    return reading


def _running_steps(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def running(self: Any, model: Any, inputs: Any, items: Any = None) -> Any:
        steps = getattr(self, "_rayzero_steps", None)
        if steps is None:
            return run(self, model, inputs, items)
        return steps.run(inputs, items)

    return running


def _ending_epoch(run_epoch: Callable[..., None]) -> Callable[..., None]:
    @wraps(run_epoch)
    def run(self: Any, *args: Any, num_update_steps_per_epoch: int, **options: Any) -> None:
        if isinstance(current_session(), JobSession):
            self._rayzero_recorder.epoch_begins(num_update_steps_per_epoch)
        over = self.control.should_training_stop or self.state.global_step >= self.state.max_steps
        if not (over and _restored_session() is not None):
            options["num_update_steps_per_epoch"] = num_update_steps_per_epoch
            run_epoch(self, *args, **options)

    return run


def _unless_ours(load: Callable[..., Any], ours: Callable[[Any], None]) -> Callable[..., Any]:
    """`load(self, folder, ...)`, but `ours(self)` for a folder that `train` was given by us."""

    @wraps(load)
    def loading(self: Any, folder: Any, *args: Any, **options: Any) -> Any:
        if folder is None or not os.path.basename(str(folder)).startswith(_FOLDER_PREFIX):
            return load(self, folder, *args, **options)
        return ours(self)

    return loading


def _after_training(load_best: Callable[[Any], None]) -> Callable[[Any], None]:
    """`_load_best_model`, also where the last step was finished before the script was entered."""

    @wraps(load_best)
    def loading(self: Any) -> None:
        if _restored_session() is not None:
            self.model_wrapped.progress.script_lag = 0
        load_best(self)

    return loading


def _evaluating_before_training(loop: Callable[..., Any]) -> Callable[..., Any]:
    """`evaluation_loop`, also before `train` in a script without a DeepSpeed config: Trainer over
    DeepSpeed refuses that below stage 3, where each rank has the whole model. Raises
    CollectiveError if a rank is lost meanwhile, whose part of the metrics is missing."""

    @wraps(loop)
    def evaluating(self: Any, *args: Any, **options: Any) -> Any:
        result = evaluate(self, *args, **options)
        steps = getattr(self, "_rayzero_steps", None)
        if steps is not None and steps.broken:
            raise CollectiveError(steps.broken)
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


_loaded_rng: dict[str, Any] = {}


def _keep_rng(engine: Any) -> None:
    """What the engine has just restored, before anything else draws numbers."""
    _loaded_rng.clear()
    _loaded_rng.update(capture_rng(engine.device))


def _restore_rng(trainer: Any) -> None:
    trainer._rayzero_recorder.restore_rng()


def _restore_schedule(trainer: Any) -> None:
    trainer._rayzero_recorder.restored_rng = dict(_loaded_rng)
    engine, found = trainer.model_wrapped, trainer._rayzero_found
    if engine.lr_scheduler is not None:
        return  # the engine has restored it
    if found is None:
        for _ in range(engine.global_steps):
            trainer.lr_scheduler.step()
        return
    load_schedule(trainer, found)


def _finish_step(trainer: Any, found: dict[str, Any] | None) -> None:
    """Continues after the last finished step, with what Trainer does for it. Its random states are
    those of the step's end, and afterwards those with which the next step begins."""
    if found is None:
        return
    recorder, state, control = trainer._rayzero_recorder, trainer.state, trainer.control
    recorder.continue_from(found)
    device = trainer.model_wrapped.device
    if recorder.restored_rng is not None:
        restore_rng(recorder.restored_rng, device)
    steps, handler = found["steps_per_epoch"], trainer.callback_handler
    if found["step_end_due"]:
        state.epoch = state.global_step / steps
        if found["schedule"] is not None:
            trainer.lr_scheduler.step()
        handler.on_step_end(trainer.args, state, control)
    else:
        vars(control).update(found["control"])
    _log_save_evaluate(trainer)
    at_end = steps and (state.global_step % steps == 0 or state.global_step >= state.max_steps)
    if at_end and found["ended_epoch"] != state.global_step:
        handler.on_epoch_end(trainer.args, state, control)
        _log_save_evaluate(trainer)
    if recorder.restored_rng is not None:
        recorder.restored_rng = capture_rng(device)


def _log_save_evaluate(trainer: Any) -> None:
    engine, epoch = trainer.model_wrapped, int(trainer.state.epoch or 0)
    norm = engine.get_global_grad_norm()
    trainer._maybe_log_save_evaluate(trainer._tr_loss, norm, engine, None, epoch, None, time.time())

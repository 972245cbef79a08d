"""transformers' Trainer in a launched script: `train` goes on at the step where the job stands.

Trainer's own resumption does most of it: it skips used batches, and restores callbacks and its log.
We give it a folder with a `TrainerState`; the engine's state, the schedule and the random states
come from the job's memory. The `TrainerState` is that of a survivor: each process keeps its own at
the beginning of every step and when it is unwound, and the ranks take the newest that fits. If all
processes were lost, it is made of the number of finished steps, without a log. What was due after
the last finished step, such as an evaluation, is done then, and nothing of it twice.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from rayzero.engine.comm.process_group import all_gather_objects
from rayzero.engine.errors import ConfigError
from rayzero.engine.session import current_session
from rayzero.engine.state.metadata import capture_rng, restore_rng
from rayzero.workers.session import JobSession

_FOLDER_PREFIX = "rz-trainer-"


@dataclass(frozen=True)
class TrainerSnapshot:
    """Where a Trainer stands.

    Attributes:
        step: finished steps.
        state: its TrainerState.
        control: the flags of its TrainerControl: what is still due after that step.
        losses: (since the last log, before it, the step of the last log, the first step).
        micro_batches: of a step, over all ranks.
        schedule: the state of a schedule that the engine does not have.
        step_end_due: the engine has finished the step, Trainer has not counted it.
    """

    step: int
    state: Any
    control: dict[str, Any]
    losses: tuple[Any, float, int, int]
    micro_batches: int
    schedule: dict[str, Any] | None
    step_end_due: bool = False


_kept: dict[str, TrainerSnapshot] = {}
"""This process's: of the beginning of the current step, and of its last unwinding."""
_found: dict[int, TrainerSnapshot | None] = {}
"""What the ranks have agreed on, by the generation's session."""


def patch_trainer(module: ModuleType) -> None:
    """Once, after the import of `transformers.trainer`. Without a job, nothing changes."""
    trainer, arguments = module.Trainer, module.TrainingArguments
    trainer.train = _resuming_train(trainer.train)
    trainer._inner_training_loop = _keeping_loop(trainer._inner_training_loop, module)
    trainer._run_epoch = _ending_epoch(trainer._run_epoch)
    trainer._load_rng_state = _unless_ours(trainer._load_rng_state, _restore_rng)
    load = trainer._load_optimizer_and_scheduler
    trainer._load_optimizer_and_scheduler = _unless_ours(load, _restore_schedule)
    loaded = module.deepspeed_load_checkpoint
    module.deepspeed_load_checkpoint = _unless_ours(loaded, _keep_rng)  # type: ignore[attr-defined]
    arguments.__post_init__ = _adapting_batches(arguments.__post_init__)


def _restored_session() -> JobSession | None:
    """The job's session, in a generation that does not start from nothing."""
    session = current_session()
    return session if isinstance(session, JobSession) and session.restored_step else None


def _adapting_batches(post_init: Callable[..., None]) -> Callable[..., None]:
    @wraps(post_init)
    def adapting(self: Any, *args: Any, **options: Any) -> None:
        session = _restored_session()
        if session is not None and (found := _agree(session)) is not None:
            ranks = int(os.environ["WORLD_SIZE"])
            if found.micro_batches % ranks:
                raise ConfigError(
                    f"Trainer's step of {found.micro_batches} micro-batches over {ranks} ranks",
                    allowed=f"numbers of ranks that divide {found.micro_batches}",
                    fix="--workers, or per_device_train_batch_size and gradient_accumulation_steps",
                )
            self.gradient_accumulation_steps = found.micro_batches // ranks
        post_init(self, *args, **options)

    return adapting


def _resuming_train(train: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(train)
    def resuming(self: Any, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        session = _restored_session()
        if session is None:
            return train(self, resume_from_checkpoint, *args, **options)
        found = self._rayzero_found = _agree(session)
        from transformers import TrainerState

        state = copy.copy(found.state) if found is not None else TrainerState()
        state.global_step = session.restored_step
        self.args.eval_on_start = False
        self.args.restore_callback_states_from_checkpoint = bool(state.stateful_callbacks)
        with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX) as folder:
            state.save_to_json(os.path.join(folder, "trainer_state.json"))
            return train(self, folder, *args, **options)

    return resuming


def _keeping_loop(loop: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    class KeepState(module.TrainerCallback):  # type: ignore[name-defined,misc]
        """Keeps the Trainer's state at the beginning of each step."""

        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer

        def on_train_begin(self, *args: Any, **options: Any) -> None:
            if (found := getattr(self.trainer, "_rayzero_found", None)) is not None:
                self.trainer._rayzero_found = None
                _finish_step(self.trainer, found)

        def on_step_begin(self, *args: Any, **options: Any) -> None:
            _kept["begin"] = _snapshot(self.trainer)

    @wraps(loop)
    def keeping(self: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(current_session(), JobSession):
            return loop(self, *args, **options)
        self.add_callback(callback := KeepState(self))
        try:
            return loop(self, *args, **options)
        except BaseException:
            if hasattr(self, "_tr_loss"):  # it had begun to train
                _kept["end"] = _settled(self, _snapshot(self))
            raise
        finally:
            self.remove_callback(callback)

    return keeping


def _ending_epoch(run_epoch: Callable[..., None]) -> Callable[..., None]:
    @wraps(run_epoch)
    def run(self: Any, *args: Any, **options: Any) -> None:
        over = self.control.should_training_stop or self.state.global_step >= self.state.max_steps
        if not (over and _restored_session() is not None):
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


_rng: dict[str, Any] = {}


def _keep_rng(engine: Any) -> None:
    """What the engine has just restored, before anything else draws numbers."""
    _rng.clear()
    _rng.update(capture_rng(engine.device))


def _restore_rng(trainer: Any) -> None:
    if _rng:
        restore_rng(_rng, trainer.model_wrapped.device)


def _restore_schedule(trainer: Any) -> None:
    engine, found = trainer.model_wrapped, trainer._rayzero_found
    if engine.lr_scheduler is not None:
        return  # the engine has restored it
    if found is None:
        for _ in range(engine.global_steps):
            trainer.lr_scheduler.step()
        return
    trainer.lr_scheduler.load_state_dict(found.schedule)
    # A schedule restores its own position only; the engine restores an optimizer's options only
    # with a schedule of its own.
    for group, lr in zip(engine.optimizer.param_groups, found.schedule["_last_lr"], strict=True):
        group["lr"] = lr


def _snapshot(trainer: Any) -> TrainerSnapshot:
    state = copy.copy(trainer.state)
    state.log_history = list(state.log_history)
    state.stateful_callbacks = _callback_states(trainer)
    schedule = trainer.lr_scheduler
    in_engine = trainer.model_wrapped.lr_scheduler is not None
    losses = (
        trainer._total_loss_scalar,
        trainer._globalstep_last_logged,
        trainer._initial_global_step,
    )
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return TrainerSnapshot(
        state.global_step,
        state,
        asdict(trainer.control),
        (trainer._tr_loss.detach().clone(), *losses),  # no wait for the device
        trainer.args.gradient_accumulation_steps * ranks,
        None if in_engine else schedule.state_dict(),
    )


def _callback_states(trainer: Any) -> dict[str, Any]:
    """As Trainer writes them into a checkpoint."""
    states: dict[str, Any] = {}
    for one in trainer.callback_handler.callbacks:
        if (state := getattr(one, "state", None)) is not None and callable(state):
            name, before = type(one).__name__, states.get(type(one).__name__)
            states[name] = [*before, state()] if isinstance(before, list) else state()
    return states


def _settled(trainer: Any, snapshot: TrainerSnapshot) -> TrainerSnapshot:
    """With the step that the engine has finished, and Trainer not counted."""
    engine = trainer.model_wrapped
    if getattr(engine, "global_steps", None) != snapshot.step + 1:
        return snapshot
    loss, *others = snapshot.losses
    total = loss + (engine.metrics.loss or 0.0)
    step = snapshot.step + 1
    return replace(snapshot, step=step, losses=(total, *others), step_end_due=True)


def _finish_step(trainer: Any, found: TrainerSnapshot) -> None:
    """Continues after the last finished step: what Trainer had still to do for it."""
    loss, total, last_logged, first = found.losses
    trainer._tr_loss = torch.tensor(loss, device=trainer.args.device)
    trainer._total_loss_scalar, trainer._globalstep_last_logged = total, last_logged
    trainer._initial_global_step = first
    control = trainer.control
    if found.step_end_due:
        if found.schedule is not None:
            trainer.lr_scheduler.step()
        trainer.callback_handler.on_step_end(trainer.args, trainer.state, control)
    else:
        vars(control).update(found.control)
    trainer._maybe_log_save_evaluate(
        trainer._tr_loss,
        trainer.model_wrapped.get_global_grad_norm(),
        trainer.model_wrapped,
        None,
        int(trainer.state.epoch or 0),
        None,
        time.time(),
    )


def _agree(session: JobSession) -> TrainerSnapshot | None:
    """The snapshot of the restored step that a rank has; None if none has. Collective."""
    if id(session) not in _found:
        step, own = session.restored_step, None
        for name in ("end", "begin"):
            if name in _kept and _kept[name].step == step and own is None:
                own = _kept[name]
        if own is not None:
            own = replace(own, losses=(float(own.losses[0]), *own.losses[1:]))
        fitting = [offer for offer in all_gather_objects(own) if offer is not None]
        _found.clear()
        _found[id(session)] = min(fitting, key=lambda it: it.step_end_due, default=None)
    return _found[id(session)]

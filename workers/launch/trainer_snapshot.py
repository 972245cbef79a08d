"""Where a Trainer of a launched script stands, as each process keeps it for the next entry.

A snapshot is kept at the beginning of every step and when `train` is unwound. After a fault the
ranks take that of the restored step from one that has it. What is still due after that step, such
as an evaluation, is done then, and nothing of it twice.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from rayzero.engine.comm.process_group import all_gather_objects
from rayzero.engine.state.metadata import capture_rng, restore_rng
from rayzero.workers.launch.kept_schedules import KEPT_STEPS
from rayzero.workers.session import JobSession


@dataclass(frozen=True)
class TrainerSnapshot:
    """Where a Trainer stands.

    Attributes:
        step: finished steps.
        state: its TrainerState.
        log_length: entries of the state's log at that time; later snapshots share the list.
        control: the flags of its TrainerControl: what is still due after that step.
        losses: (since the last log, before it, the step of the last log, the first step); the first
            one over all ranks, also those that are lost.
        steps_per_epoch: steps of an epoch.
        ended_epoch: the step of the last end of an epoch that was announced.
        schedule: the state of a schedule that the engine does not have.
        step_end_due: the engine has finished the step, Trainer has not counted it.
    """

    step: int
    state: Any
    log_length: int
    control: dict[str, Any]
    losses: tuple[float, float, int, int]
    steps_per_epoch: int
    ended_epoch: int
    schedule: dict[str, Any] | None
    step_end_due: bool = False


_kept: dict[int, TrainerSnapshot] = {}
"""This process's, by their steps."""
_found: WeakKeyDictionary[JobSession, TrainerSnapshot | None] = WeakKeyDictionary()
"""What the ranks of a generation have agreed on."""


class Recorder:
    """Keeps a Trainer's snapshots and random states, from one call of `train`.

    Attributes:
        steps_per_epoch: 0 until the first epoch has begun.
        parts: batches of a step, over all ranks.
        restored_rng: the random states of the restored step, until they are set again.
    """

    def __init__(self, trainer: Any) -> None:
        self.steps_per_epoch = 0
        self.parts = trainer.args.gradient_accumulation_steps * dist.get_world_size()
        self.restored_rng: dict[str, Any] | None = None
        self._trainer = trainer
        self._loss = 0.0  # since the last log: the global batch's, which a lost rank has a part in
        self._begun = self._ended_epoch = -1

    def continue_from(self, found: TrainerSnapshot) -> None:
        self._loss, self._ended_epoch = found.losses[0], found.ended_epoch
        self.steps_per_epoch = found.steps_per_epoch

    def epoch_begins(self, steps: int) -> None:
        self.steps_per_epoch = steps
        self._keep_rng()

    def step_begins(self) -> None:
        self._begun = step = self._trainer.state.global_step
        if step == self._trainer._globalstep_last_logged:
            self._loss = 0.0
        self._keep_rng()
        _kept[step] = self.snapshot()
        _kept.pop(step - KEPT_STEPS, None)

    def step_is_done(self) -> None:
        self._loss += _loss_of(self._trainer)

    def epoch_ends(self) -> None:
        self._ended_epoch = self._trainer.state.global_step

    def training_ends(self) -> None:
        self._begun = step = self._trainer.state.global_step
        _kept[step] = self.snapshot()

    def unwinds(self) -> None:
        """Keeps what is due, if it was unwound between two steps, and the step that the engine has
        finished, and Trainer not counted."""
        snapshot, engine = self.snapshot(), self._trainer.model_wrapped
        if getattr(engine, "global_steps", None) == snapshot.step + 1:
            loss, total, *steps = snapshot.losses
            losses = (loss + _loss_of(self._trainer), total, steps[0], steps[1])
            step = snapshot.step + 1
            _kept[step] = replace(snapshot, step=step, losses=losses, step_end_due=True)
        elif self._begun != snapshot.step:
            _kept[snapshot.step] = snapshot

    def snapshot(self) -> TrainerSnapshot:
        trainer = self._trainer
        state = copy.copy(trainer.state)
        state.stateful_callbacks = export_callbacks(trainer)
        in_engine = trainer.model_wrapped.lr_scheduler is not None
        last_logged = trainer._globalstep_last_logged
        log = state.log_history
        has_summary = bool(log) and "train_runtime" in log[-1]  # logged at each end of training
        loss = 0.0 if has_summary or last_logged == state.global_step else self._loss
        return TrainerSnapshot(
            state.global_step,
            state,
            len(log) - has_summary,
            asdict(trainer.control),
            (loss, trainer._total_loss_scalar, last_logged, trainer._initial_global_step),
            self.steps_per_epoch,
            self._ended_epoch,
            None if in_engine else trainer.lr_scheduler.state_dict(),
        )

    def restore_rng(self) -> None:
        """Sets the random states of the restored step again, once."""
        if self.restored_rng is not None:
            restore_rng(self.restored_rng, self._trainer.model_wrapped.device)
            self.restored_rng = None

    def restore_own_rng(self) -> None:
        """Sets the random states again with which the present step began."""
        own = _rngs.get(self._trainer.state.global_step)
        if own is not None:
            restore_rng(own, self._trainer.model_wrapped.device)

    def after_due_work(self, due_work: Callable[[], None]) -> None:
        """Does what was due after the restored step, with the random states of its end. Then those
        of the next step's beginning apply: this process's own, if it had got so far."""
        if (restored := self.restored_rng) is not None:
            restore_rng(restored, self._trainer.model_wrapped.device)
        due_work()
        if restored is not None:
            own = _rngs.get(self._trainer.state.global_step)
            self.restored_rng = own or capture_rng(self._trainer.model_wrapped.device)

    def _keep_rng(self) -> None:
        step = self._trainer.state.global_step
        if self.restored_rng is None and step not in _rngs:
            _rngs[step] = capture_rng(self._trainer.model_wrapped.device)
            _rngs.pop(step - KEPT_STEPS, None)


_rngs: dict[int, dict[str, Any]] = {}
"""This process's, from where Trainer sets them again: of an epoch's beginning, or of a step's."""


def _loss_of(trainer: Any) -> float:
    """The last step's, as Trainer averages it over ranks."""
    loss = trainer.model_wrapped.metrics.loss
    return loss if loss is not None and math.isfinite(loss) else 0.0


def export_callbacks(trainer: Any) -> dict[str, Any]:
    """The states of callbacks and of the control, as Trainer writes them into a checkpoint."""
    states: dict[str, Any] = {}
    for it in (*trainer.callback_handler.callbacks, trainer.control):
        if callable(state := getattr(it, "state", None)):
            name = type(it).__name__
            before = states.get(name)
            new = state()
            if before is not None:
                new = [*(before if isinstance(before, list) else [before]), new]
            states[name] = new
    return states


def load_schedule(trainer: Any, state: dict[str, Any]) -> None:
    """Loads a schedule that the engine does not have, and sets the engine's rates: the schedule
    restores its own position only, the engine an optimizer's options only with its own schedule."""
    trainer.lr_scheduler.load_state_dict(state)
    groups = trainer.model_wrapped.optimizer.param_groups
    for group, lr in zip(groups, state["_last_lr"], strict=True):
        group["lr"] = lr


def agree(session: JobSession) -> TrainerSnapshot | None:
    """The snapshot of the restored step that a rank has; None if none has. Collective.

    It forgets what belongs to steps that will be done again.
    """
    if session not in _found:
        step = session.restored_step
        for kept in (_kept, _rngs):
            for later in [it for it in kept if it > step]:
                del kept[later]
        own = _kept.get(step)
        # One rank alone sends its log: the first one that has counted the step.
        offers = all_gather_objects(None if own is None else own.step_end_due)
        known = [(due, rank) for rank, due in enumerate(offers) if due is not None]
        sender = min(known)[1] if known else -1
        is_sender = sender >= 0 and dist.get_rank() == sender
        sent = all_gather_objects(own if is_sender else None)
        _found[session] = sent[sender] if sender >= 0 else None
    return _found[session]

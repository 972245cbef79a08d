"""The state of a transformers Trainer that the engine does not have: counters, log, callbacks.

The state is registered with the training state, from which a Trainer in a new process continues.
Survivors also send it to new members.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from importlib import import_module
from typing import Any

import numpy as np
import torch.distributed as dist

NAME = "rayzero.trainer"
"""The name of a Trainer's state in the training state."""
_NOT_KEPT = frozenset(
    {"is_local_process_zero", "is_world_process_zero", "log_history", "stateful_callbacks"}
)
"""Attributes of a TrainerState that differ between ranks, or are kept otherwise."""


class Recorder:
    """Records the state of the Trainer in one call of `train`.

    Attributes:
        steps_per_epoch: 0 until Trainer has counted them.
        parts: number of batches of a step, over all ranks.
    """

    def __init__(self, trainer: Any) -> None:
        self.steps_per_epoch = 0
        self.parts = trainer.args.gradient_accumulation_steps * dist.get_world_size()
        self._trainer = trainer
        self._ended_epoch = -1  # step of the newest epoch's end that callbacks were called for
        self._loss = 0.0  # sum since the last log, of the global batch: a rank may be lost
        self._log = np.empty(0, dtype=np.uint8)
        self._logged = 0  # number of entries in `_log`

    def step_begins(self) -> None:
        if self._trainer.state.global_step == self._trainer._globalstep_last_logged:
            self._loss = 0.0

    def step_is_done(self) -> None:
        self._loss += self._step_loss

    def epoch_ends(self) -> None:
        self._ended_epoch = self._trainer.state.global_step

    def tell(self) -> tuple[int, dict[str, Any]]:
        """Returns the finished steps after which `state` holds, and `state`."""
        state = self.state()
        return self._trainer.state.global_step + state["step_end_due"], state

    def state(self) -> dict[str, Any]:
        """Returns the argument of `take`. If `step_end_due`, the engine has finished a step that
        Trainer has not counted. Otherwise `control` has what is due after the last step, and an
        epoch's end is due if the step is the last of an epoch and not `ended_epoch`."""
        trainer = self._trainer
        is_due = trainer.model_wrapped.global_steps > trainer.state.global_step
        return {
            "state": {
                name: value for name, value in vars(trainer.state).items() if name not in _NOT_KEPT
            },
            "log": self._encoded_log(),
            "callbacks": export_callbacks(trainer),
            "control": asdict(trainer.control),
            "schedule": schedule_state(trainer),
            "losses": (self._loss_since_log(is_due), trainer._total_loss_scalar),
            "steps": (trainer._globalstep_last_logged, trainer._initial_global_step),
            "steps_per_epoch": self.steps_per_epoch,
            "step_end_due": is_due,
            "ended_epoch": self._ended_epoch,
        }

    def take(self, found: dict[str, Any]) -> None:
        """Lets a Trainer that has begun to train continue where the sender of `state` is."""
        trainer = self._trainer
        vars(trainer.state).update(state_attributes(found))
        trainer.args.restore_callback_states_from_checkpoint = True
        trainer._load_callback_state()
        vars(trainer.control).update(found["control"])
        load_schedule(trainer, found["schedule"])
        self.continue_from(found)

    def continue_from(self, found: dict[str, Any]) -> None:
        """Does the part of `take` that Trainer's own resumption leaves out."""
        trainer = self._trainer
        self._loss, trainer._total_loss_scalar = found["losses"]
        trainer._tr_loss.fill_(self._loss)
        trainer._globalstep_last_logged, trainer._initial_global_step = found["steps"]
        self._ended_epoch = found["ended_epoch"]

    def _loss_since_log(self, is_due: bool) -> float:
        if is_due:
            return self._loss + self._step_loss
        state = self._trainer.state
        is_logged = self._trainer._globalstep_last_logged == state.global_step
        return 0.0 if is_logged or _has_summary(state.log_history) else self._loss

    @property
    def _step_loss(self) -> float:
        """The loss of the last step, averaged over ranks as by Trainer."""
        loss = self._trainer.model_wrapped.metrics.loss
        return loss if loss is not None and math.isfinite(loss) else 0.0

    def _encoded_log(self) -> np.ndarray[Any, Any]:
        """Returns the log as lines of JSON. Called in every step, so encodes only a log that has
        grown."""
        log = self._trainer.state.log_history
        log = log[:-1] if _has_summary(log) else log  # a summary is logged at each end of training
        if len(log) != self._logged:
            lines = "".join(f"{json.dumps(entry, default=float)}\n" for entry in log)
            self._log, self._logged = np.frombuffer(lines.encode(), dtype=np.uint8), len(log)
        return self._log


def _has_summary(log: list[dict[str, Any]]) -> bool:
    return bool(log) and "train_runtime" in log[-1]


def state_attributes(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a TrainerState, from what `Recorder.state` has returned."""
    log = [json.loads(line) for line in found["log"].tobytes().splitlines()]
    kept: dict[str, Any] = found["state"]
    return kept | {"log_history": log, "stateful_callbacks": found["callbacks"]}


def schedule_state(trainer: Any) -> dict[str, Any] | None:
    """Returns the state of the Trainer's schedule; None if the engine has the schedule."""
    if trainer.model_wrapped.lr_scheduler is not None:
        return None
    state: dict[str, Any] = trainer.lr_scheduler.state_dict()
    return state


def load_schedule(trainer: Any, state: dict[str, Any] | None) -> None:
    """Loads a schedule that the engine does not have, and sets the engine's learning rates. The
    schedule restores only its position, and the engine restores rates only with its own schedule.
    """
    if state is None:
        return
    trainer.lr_scheduler.load_state_dict(state)
    groups = trainer.model_wrapped.optimizer.param_groups
    for group, lr in zip(groups, state["_last_lr"], strict=True):
        group["lr"] = lr


def export_callbacks(trainer: Any) -> dict[str, Any]:
    """Returns the states of callbacks and control, as Trainer writes them into a checkpoint."""
    library = import_module("transformers.trainer_callback")
    every = (*trainer.callback_handler.callbacks, trainer.control)
    kept = [owner for owner in every if isinstance(owner, library.ExportableState)]
    states: dict[str, Any] = library.TrainerState(stateful_callbacks=kept).stateful_callbacks
    return states

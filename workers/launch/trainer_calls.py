"""The steps that a transformers Trainer runs, and those that it has finished, to run them again.

A step that Trainer has counted may be lost with a rank, before the copy of its state in memory was
complete on all ranks. Then the job goes back behind it, and its batches are trained on again: with
the random states and the learning rate that it had, and without what Trainer did after it, which
stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rayzero.engine.errors import CollectiveError
from rayzero.engine.state.metadata import restore_rng
from rayzero.workers.launch.accelerated_loop import read_behind
from rayzero.workers.launch.read_batches import present_ranks
from rayzero.workers.launch.trainer_state import Recorder, load_schedule


class TrainerCalls:
    """Reads a step's batches and trains on them, by a Trainer's own methods.

    Args:
        base: transformers' Trainer, with our wrappers around its methods.
    """

    def __init__(self, trainer: Any, base: Any, recorder: Recorder) -> None:
        self._trainer = trainer
        self._recorder = recorder
        self._read = base.get_batch_samples.__wrapped__
        self._run = base.training_step.__wrapped__
        self._loader = trainer.callback_handler.train_dataloader

    def read(self, source: Iterator[Any], count: int) -> tuple[list[Any], Any]:
        """Reads batches; also returns the number of their items, which weights the loss."""
        batches, items = self._read(self._trainer, source, count, self._trainer.args.device)
        return batches, items

    def run(self, inputs: Any, items: Any) -> Tensor:
        """Trains on one batch; the last one of a step ends it. Returns its part of the loss."""
        loss: Tensor = self._run(self._trainer, self._trainer.model_wrapped, inputs, items)
        return loss

    def run_all(self, batches: list[Any], items: Any) -> Tensor:
        """Trains on all batches of a step. Returns the loss."""
        trainer = self._trainer
        loss: Tensor = trainer._tr_loss.new_zeros(())
        trainer.current_gradient_accumulation_steps = count = len(batches)
        for turn, inputs in enumerate(batches, 1):
            trainer.accelerator.sync_gradients = turn == count
            loss = loss + self.run(copy_batch(inputs), items)
        return loss

    def source_of(self, step: int) -> Iterator[Any]:
        """The batches of an epoch from `step` on, cut for the present ranks."""
        epoch, done = divmod(step, self._recorder.steps_per_epoch)
        behind = done * (self._recorder.parts // dist.get_world_size())
        return read_behind(self._loader, behind, epoch, agreed=True)

    def batches_of(self, turns: int) -> int:
        """Number of this rank's batches of a step for which Trainer's loop makes so many turns:
        less at an epoch's end, where Trainer's own number is right."""
        batches: int = self._recorder.parts // dist.get_world_size()
        return turns if batches == self._trainer.args.gradient_accumulation_steps else batches


@dataclass(frozen=True)
class _Finished:
    """A finished step: the batches that it read, and the states with which it began.

    Args:
        ranks: this rank and the world size, for which the batches are cut.
        schedule: None where the engine has it.
    """

    batches: list[Any]
    turns: int
    ranks: tuple[int, int]
    rng: dict[str, Any]
    schedule: dict[str, Any] | None


class FinishedSteps:
    """The last steps of a Trainer, as many as the job may go back."""

    def __init__(self, trainer: Any, calls: TrainerCalls, recorder: Recorder) -> None:
        self._trainer = trainer
        self._calls = calls
        self._recorder = recorder
        self._steps: dict[int, _Finished] = {}

    def keep(
        self, step: int, batches: list[Any], turns: int, ranks: tuple[int, int], oldest: int
    ) -> None:
        """Keeps a step that ends, before Trainer counts it, and forgets those before `oldest`."""
        rng, schedule = self._recorder.begun_rng, self._schedule()
        self._steps[step] = _Finished(batches, turns, ranks, rng, schedule)
        for old in [it for it in self._steps if it < oldest]:
            del self._steps[old]

    def run_again(self, step: int) -> None:
        """Runs the step that follows `step` finished ones; it may be lost again. Leaves the random
        states of its end.

        Raises:
            CollectiveError: it was not kept: the script is run again.
        """
        calls, device = self._calls, self._trainer.model_wrapped.device
        if (kept := self._steps.get(step)) is None:
            counted = self._trainer.state.global_step
            raise CollectiveError(
                f"the job went back to step {step}, Trainer has counted {counted}"
            )
        schedule = self._schedule()
        source, count = iter(kept.batches), len(kept.batches)
        if kept.ranks != present_ranks():
            source, count = calls.source_of(step), calls.batches_of(kept.turns)
        batches, items = calls.read(source, count)
        restore_rng(kept.rng, device)
        self._load_schedule(kept.schedule)
        calls.run_all(batches, items)
        self._load_schedule(schedule)

    def _schedule(self) -> dict[str, Any] | None:
        trainer = self._trainer
        if trainer.model_wrapped.lr_scheduler is not None:
            return None
        state: dict[str, Any] = trainer.lr_scheduler.state_dict()
        return state

    def _load_schedule(self, state: dict[str, Any] | None) -> None:
        load_schedule(self._trainer, {"schedule": state})


def copy_batch(inputs: Any) -> Any:
    """Copies a batch, but not its tensors: a loss function may remove labels from it."""
    return dict(inputs) if isinstance(inputs, dict) else inputs

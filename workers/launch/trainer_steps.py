"""The steps of a transformers Trainer whose ranks may change: read, run, and run again where lost.

The number of turns of Trainer's loop is fixed, and so is the number of batches that it takes in
each. So a lost step is run again within the turn, and a step over other ranks than those that the
loop has begun on runs all of this rank's batches in the last turn of the step.

New members begin with the loop's first turn, without what Trainer knows of earlier steps: they get
it from a survivor where both read the batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rayzero.engine.comm.process_group import all_gather_objects
from rayzero.engine.engine import Engine
from rayzero.engine.errors import CollectiveError
from rayzero.workers.launch.accelerated import count_ranks
from rayzero.workers.launch.accelerated_loop import can_read_again, read_behind
from rayzero.workers.launch.trainer_state import Recorder
from rayzero.workers.session import JobSession

Read = Callable[[Iterator[Any], int], tuple[list[Any], Any]]
Run = Callable[[Any, Any], Tensor]
_OF_RANK = ("is_local_process_zero", "is_world_process_zero")
"""Attributes of a TrainerState that differ between the ranks."""


def can_follow(trainer: Any, base: type) -> bool:
    """Whether the steps of a Trainer can be run again: not if its class makes the inputs, or the
    step, in another way than `base`; nor if it counts tokens in collectives for each batch."""
    own = ("get_batch_samples", "training_step", "_prepare_inputs")
    if any(getattr(type(trainer), name) is not getattr(base, name) for name in own):
        return False
    counts = trainer.args.include_num_input_tokens_seen not in ("no", False)
    loader = trainer.callback_handler.train_dataloader
    return not counts and can_read_again(loader, by_epoch=True)


class TrainerSteps:
    """The steps of one call of `train`, in its training thread."""

    def __init__(
        self, trainer: Any, session: JobSession, engine: Engine, recorder: Recorder
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._engine = engine
        self._recorder = recorder
        self._loader = trainer.callback_handler.train_dataloader
        self._iterator: Iterator[Any] | None = None  # Trainer's, of the epoch
        self._source: Iterator[Any] = iter(())
        self._ranks = self._present_ranks
        """Rank and world size for which `_source` is cut."""
        self._inputs: list[Any] = []
        self._turns = self._turn = 0
        self._loss_told: Tensor | float = 0.0
        self._lost_steps = 0
        self._knows_state = not session.assignment.survivors_stay
        self._met = session.assignment.generation if self._knows_state else 0

    @property
    def broken(self) -> str:
        """Why a rank is missing; empty if none is."""
        return self._engine.survival.local_reason

    def read(self, iterator: Iterator[Any], count: int, read: Read) -> tuple[list[Any], Any]:
        """Does what `get_batch_samples` does: returns as many batches as Trainer asks for, and
        reads those of this rank's part of the step."""
        self._begin_step()
        if iterator is not self._iterator:
            if self._iterator is not None:  # an epoch is cut where its first batch is read
                self._ranks = self._present_ranks
            self._iterator = self._source = iterator
        if self._ranks != self._present_ranks:
            self._read_again()
        batches, items = read(self._source, self._step_batches(count))
        self._inputs = [*map(_copy, batches)]
        self._turns, self._turn, self._loss_told = count, 0, 0.0
        self._lost_steps = self._engine.progress.lost_steps
        if len(batches) == count or not batches:
            self._turns = len(batches)
            return batches, items
        return [batches[0]] * count, items

    def run(self, inputs: Any, items: Any, read: Read, run: Run) -> Tensor:
        """Does what `training_step` does. The sum of a step's results is the loss of the global
        batch, so that what Trainer logs does not depend on ranks that are lost before it does."""
        self._turn += 1
        is_last = self._turn == self._turns
        is_trainers = len(self._inputs) == self._turns
        if is_trainers or is_last:
            loss = run(inputs, items) if is_trainers else self._run_all(items, run)
        else:
            loss = self._trainer._tr_loss.new_zeros(())
        while is_last and self._lost_steps != self._engine.progress.lost_steps:
            self._lost_steps = self._engine.progress.lost_steps
            self._begin_step()
            if self._ranks != self._present_ranks:
                self._read_again()
                self._inputs, items = read(self._source, self._step_batches(self._turns))
            else:
                _, items = read(iter(self._inputs), len(self._inputs))
            self._recorder.restore_own_rng()
            loss = self._run_all(items, run)
        if not is_last:
            self._loss_told = self._loss_told + loss
        elif (told := self._engine.metrics.loss) is not None:
            loss = self._trainer._tr_loss.new_tensor(told) - self._loss_told  # in its sum's dtype
        return loss

    def _run_all(self, items: Any, run: Run) -> Tensor:
        trainer = self._trainer
        loss: Tensor = trainer._tr_loss.new_zeros(())
        trainer.current_gradient_accumulation_steps = count = len(self._inputs)
        for turn, inputs in enumerate(self._inputs, 1):
            trainer.accelerator.sync_gradients = turn == count
            loss = loss + run(_copy(inputs), items)
        return loss

    def _begin_step(self) -> None:
        """Waits for all ranks, if some were lost or are new. Raises CollectiveError if the job has
        gone back behind a step that Trainer has counted: the script is run again."""
        self._session.on_phase("data")
        self._engine.survival.await_group()
        step, counted = self._engine.progress.step, self._trainer.state.global_step
        if step < counted:
            raise CollectiveError(
                f"the job went back to step {step}, Trainer has counted {counted}"
            )
        if self._met != self._session.assignment.generation:
            self._met = self._session.assignment.generation
            count_ranks(self._trainer.accelerator)
            for name in _OF_RANK:
                setattr(self._trainer.state, name, getattr(self._trainer, name)())
            with suppress(CollectiveError):  # the group broke: they meet again in the next one
                self._meet()

    def _meet(self) -> None:
        """Gives a survivor's state to the new members. Collective."""
        knows = all_gather_objects(self._knows_state)
        sender = knows.index(True) if any(knows) else -1
        is_sender = sender == dist.get_rank()
        sent = all_gather_objects(self._recorder.state() if is_sender else None)[sender]
        if not self._knows_state and sent is not None:
            self._recorder.take(sent)
            self._knows_state = True

    def _read_again(self) -> None:
        """Reads the epoch again, cut for the present ranks, from its first unfinished step on."""
        epoch, done = divmod(self._trainer.state.global_step, self._recorder.steps_per_epoch)
        self._ranks = self._present_ranks
        behind = done * (self._recorder.parts // dist.get_world_size())
        self._source = read_behind(self._loader, behind, epoch, agreed=True)

    def _step_batches(self, count: int) -> int:
        """Number of this rank's batches of a step: `count`, which is less at an epoch's end, where
        Trainer's own number is right."""
        batches: int = self._recorder.parts // dist.get_world_size()
        return count if batches == self._trainer.args.gradient_accumulation_steps else batches

    @property
    def _present_ranks(self) -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()


def _copy(inputs: Any) -> Any:
    """Copies a batch, but not its tensors: a loss function may remove labels from it."""
    return dict(inputs) if isinstance(inputs, dict) else inputs

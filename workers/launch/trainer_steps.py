"""The steps of a transformers Trainer whose ranks may change: read, run, and run again where lost.

The number of turns of Trainer's loop is fixed, and so is the number of batches that it takes in
each. So a lost step is run again within the turn, and a step over other ranks than those that the
loop has begun on runs all of this rank's batches in the last turn of the step.

New members begin with the loop's first turn, without what Trainer knows of earlier steps: they get
it from a survivor where both read the batches of a step. If the job has gone back, that is after
the last step that a survivor has counted: until then survivors run their steps again, new members
run them for the first time, and log, save and evaluate nothing, as the survivors have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rayzero.engine.comm.process_group import all_gather_objects
from rayzero.engine.engine import Engine
from rayzero.engine.errors import CollectiveError
from rayzero.engine.state.metadata import capture_rng, restore_rng
from rayzero.workers.launch.accelerated import count_ranks
from rayzero.workers.launch.accelerated_loop import can_read_again
from rayzero.workers.launch.read_batches import present_ranks
from rayzero.workers.launch.trainer_calls import FinishedSteps, TrainerCalls, copy_batch
from rayzero.workers.launch.trainer_state import Recorder
from rayzero.workers.session import JobSession

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
        self, trainer: Any, session: JobSession, engine: Engine, recorder: Recorder, base: type
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._recorder = recorder
        self._calls = TrainerCalls(trainer, base, recorder)
        self._finished = FinishedSteps(trainer, self._calls, recorder)
        self._ranks = _Ranks(trainer, session, recorder)
        self._session = session
        self._iterator: Iterator[Any] | None = None  # Trainer's, of the epoch
        self._source: Iterator[Any] = iter(())
        self._cut_for = present_ranks()
        """Rank and world size for which `_source` is cut."""
        self._inputs: list[Any] = []
        self._turns = self._turn = 0
        self._loss_told: Tensor | float = 0.0
        self._lost_steps = 0

    @property
    def broken(self) -> str:
        """Why a rank is missing; empty if none is."""
        return self._engine.survival.local_reason

    @property
    def is_quiet(self) -> bool:
        """Whether a survivor has done what Trainer does after the step that it has counted last."""
        counted: int = self._trainer.state.global_step
        return counted <= self._ranks.counted

    def read(self, iterator: Iterator[Any], count: int) -> tuple[list[Any], Any]:
        """Does what `get_batch_samples` does: returns as many batches as Trainer asks for, and
        reads those of this rank's part of the step."""
        self._begin_step()
        if iterator is not self._iterator:
            if self._iterator is not None:  # an epoch is cut where its first batch is read
                self._cut_for = present_ranks()
            self._iterator = self._source = iterator
        rng: dict[str, Any] | None = None
        if self._cut_for != present_ranks():
            rng = capture_rng(self._engine.device)  # the beginning of an iteration draws a number
            self._read_again()
        batches, items = self._calls.read(self._source, self._calls.batches_of(count))
        if rng is not None:
            restore_rng(rng, self._engine.device)
        self._inputs = [*map(copy_batch, batches)]
        self._turns = count
        self._turn = 0
        self._loss_told = 0.0
        self._lost_steps = self._engine.progress.lost_steps
        if len(batches) == count or not batches:
            self._turns = len(batches)
            return batches, items
        return [batches[0]] * count, items

    def run(self, inputs: Any, items: Any) -> Tensor:
        """Does what `training_step` does. The sum of a step's results is the loss of the global
        batch, so that what Trainer logs does not depend on ranks that are lost before it does."""
        calls = self._calls
        self._turn += 1
        is_last = self._turn == self._turns
        is_trainers = len(self._inputs) == self._turns
        if is_trainers or is_last:
            loss = calls.run(inputs, items) if is_trainers else calls.run_all(self._inputs, items)
        else:
            loss = self._trainer._tr_loss.new_zeros(())
        while is_last and self._lost_steps != self._engine.progress.lost_steps:
            self._begin_step()
            self._lost_steps = self._engine.progress.lost_steps
            if self._cut_for != present_ranks():
                self._read_again()
                self._inputs, items = calls.read(self._source, calls.batches_of(self._turns))
            else:
                _, items = calls.read(iter(self._inputs), len(self._inputs))
            self._recorder.restore_own_rng()
            loss = calls.run_all(self._inputs, items)
        if not is_last:
            self._loss_told = self._loss_told + loss
            return loss
        step: int = self._trainer.state.global_step
        oldest = step - self._session.steps_to_go_back
        self._finished.keep(step, self._inputs, self._turns, self._cut_for, oldest)
        if (told := self._engine.metrics.loss) is not None:
            loss = self._trainer._tr_loss.new_tensor(told) - self._loss_told  # in its sum's dtype
        return loss

    def _begin_step(self) -> None:
        """Waits for all ranks, if some were lost or are new. Runs steps again behind which the job
        has gone back."""
        device = self._engine.device
        rng, goes_back = capture_rng(device), False  # the engine goes back to the restored ones
        while True:
            self._session.on_phase("data")
            self._engine.survival.await_group()
            step = self._engine.progress.step
            self._ranks.meet(step)
            if step >= self._trainer.state.global_step:
                break
            goes_back = True
            self._finished.run_again(step)
        if goes_back:
            restore_rng(rng, device)

    def _read_again(self) -> None:
        """Reads the epoch again, cut for the present ranks, from its first unfinished step on."""
        self._cut_for = present_ranks()
        self._source = self._calls.source_of(self._trainer.state.global_step)


class _Ranks:
    """The ranks of a generation, which meet where they read the batches of a step.

    Attributes:
        counted: steps that a survivor has counted when it came to this generation; -1 in the first.
    """

    def __init__(self, trainer: Any, session: JobSession, recorder: Recorder) -> None:
        self.counted = -1
        self._trainer = trainer
        self._session = session
        self._recorder = recorder
        self._knows_state = not session.assignment.survivors_stay
        self._met = session.assignment.generation if self._knows_state else 0
        self._sender: int | None = None
        """The rank that sends its state to new members, once all are where it is."""

    def meet(self, step: int) -> None:
        """Called by all ranks where a step begins, after `step` finished ones."""
        with suppress(CollectiveError):  # the group broke: they meet again in the next one
            if self._met != self._session.assignment.generation:
                self._met = self._session.assignment.generation
                self._meet()
            if self._sender is not None and step == self.counted:
                self._send(self._sender)

    def _meet(self) -> None:
        """Finds out where the ranks are. Collective."""
        count_ranks(self._trainer.accelerator)
        for name in _OF_RANK:
            setattr(self._trainer.state, name, getattr(self._trainer, name)())
        self.counted, self._sender = -1, None
        reported = all_gather_objects((self._knows_state, self._trainer.state.global_step))
        counted = [steps if knows else -1 for knows, steps in reported]
        self.counted = max(counted)
        if self.counted >= 0:
            self._sender = counted.index(self.counted)

    def _send(self, sender: int) -> None:
        """Gives a survivor's state to the new members. Collective."""
        self._sender = None
        is_sender = sender == dist.get_rank()
        sent = all_gather_objects(self._recorder.state() if is_sender else None)[sender]
        if not self._knows_state and sent is not None:
            self._recorder.take(sent)
            self._knows_state = True

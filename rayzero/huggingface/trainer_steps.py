"""The steps of a transformers Trainer whose ranks may change: read, run, and run again if lost.

The number of turns of Trainer's loop is fixed, and so is the number of batches that the loop takes
in each turn. A lost step is therefore run again within the turn. A step on other ranks than those
on which the loop has begun runs all of this rank's batches in the last turn of the step. A step
that Trainer has counted is run again without what Trainer did after it (logs, saves, evaluations).

New members begin with the loop's first turn and without Trainer's state. A survivor sends them its
state where both read the batches of a step. If the job has gone back, this happens after the last
step that a survivor has counted. Until then survivors run their steps again, and new members run
them for the first time, but do not log, save or evaluate, because the survivors have done so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rayzero.engine.engine import Engine
from rayzero.engine.errors import CollectiveError
from rayzero.engine.state.metadata import capture_rng, restore_rng
from rayzero.huggingface.accelerated_loop import can_read_again, count_ranks, read_behind
from rayzero.huggingface.trainer_state import Recorder, load_schedule, schedule_state
from rayzero.workers.launch.followed_loop import FollowedLoop, present_ranks
from rayzero.workers.session import JobSession


def _base() -> Any:
    return import_module("transformers").Trainer


def can_follow(trainer: Any) -> bool:
    """Returns whether the steps of a Trainer can be run again. They cannot if its class overrides
    how inputs are read or a step is run, or if it counts tokens in a collective for each batch."""
    own = ("get_batch_samples", "training_step", "_prepare_inputs")
    if any(getattr(type(trainer), name) is not getattr(_base(), name) for name in own):
        return False
    counts = trainer.args.include_num_input_tokens_seen not in ("no", False)
    loader = trainer.callback_handler.train_dataloader
    return not counts and can_read_again(loader, by_epoch=True)


@dataclass
class _Step:
    """A step that this rank runs, or has finished.

    Attributes:
        batches: the batches that this rank has read for it.
        ranks: the rank and the world size for which `batches` were cut.
        turns: the turns of Trainer's loop in the step.
        rng, schedule: the states with which the step began; `schedule` is None if the engine has
            the schedule.
        turn: the present turn, from 1.
        given: the sum of the losses returned to Trainer.
    """

    batches: list[Any]
    ranks: tuple[int, int]
    turns: int
    rng: dict[str, Any]
    schedule: dict[str, Any] | None
    turn: int = 0
    given: Tensor | float = 0.0


class TrainerSteps:
    """The steps of one call of `train`. Used by the training thread."""

    def __init__(
        self, trainer: Any, session: JobSession, engine: Engine, recorder: Recorder
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._recorder = recorder
        self._loader = trainer.callback_handler.train_dataloader
        self._iterator: Iterator[Any] | None = None  # Trainer's, of the present epoch
        self._source: Iterator[Any] = iter(())
        self._loop = FollowedLoop(session, engine)
        self._steps: dict[int, _Step] = self._loop.kept
        self._counted = -1
        """Steps that a survivor had counted on entry to this generation; -1 in the first one."""
        self._sender: int | None = None
        """The rank that sends its state to new members, once all ranks have run its steps."""

    @property
    def broken(self) -> str:
        """Why a rank is missing; empty if none is."""
        return self._engine.survival.local_reason

    @property
    def is_quiet(self) -> bool:
        """Whether a survivor has done already what Trainer does after the last counted step."""
        counted: int = self._trainer.state.global_step
        return counted <= self._counted

    def read(self, iterator: Iterator[Any], count: int) -> tuple[list[Any], Any]:
        """Does what `get_batch_samples` does. Reads this rank's batches of the step, and returns as
        many batches as Trainer asks for."""
        self._await_ranks()
        step: int = self._trainer.state.global_step
        if iterator is not self._iterator:
            if self._iterator is not None:  # a new epoch, which was cut for the present ranks
                self._loop.ranks = present_ranks()
            self._iterator = self._source = iterator
        if self._loop.ranks != present_ranks():
            self._loop.ranks = present_ranks()
            self._source = self._source_of(step)
        batches, items = self._read(self._source, self._batches_of(count))
        kept = [*map(_copy_batch, batches)]
        turns = count if batches and len(batches) != count else len(batches)
        self._steps[step] = _Step(kept, self._loop.ranks, turns, {}, schedule_state(self._trainer))
        return (batches if turns == len(batches) else [batches[0]] * turns), items

    def run(self, inputs: Any, items: Any) -> Tensor:
        """Does what `training_step` does. The results of a step add up to the loss of the global
        batch, so that the loss in Trainer's log includes ranks that are lost before it is written.
        """
        number: int = self._trainer.state.global_step
        step, engine = self._steps[number], self._engine
        if not step.turn:
            step.rng = capture_rng(engine.device)
        step.turn += 1
        is_batch_per_turn = len(step.batches) == step.turns
        if step.turn < step.turns:
            loss = self._run(inputs, items) if is_batch_per_turn else self._no_loss()
            step.given = step.given + loss
            return loss
        loss = self._run(inputs, items) if is_batch_per_turn else self._run_all(step, items)
        while self._loop.has_changed:
            self._await_ranks()
            loss = self._run_again(number)
        if (global_loss := engine.metrics.loss) is not None:  # in the dtype of Trainer's sum
            loss = self._trainer._tr_loss.new_tensor(global_loss) - step.given
        return loss

    def _await_ranks(self) -> None:
        """Waits for all ranks, and runs the counted steps again that the job has gone back by."""
        device = self._engine.device
        rng, goes_back = capture_rng(device), False  # the engine sets the restored random states
        while True:
            if self._loop.follow():
                self._begin_generation()
            self._meet()
            if self._loop.step >= self._trainer.state.global_step:
                break
            goes_back = True
            schedule = schedule_state(self._trainer)
            self._run_again(self._loop.step)
            load_schedule(self._trainer, schedule)
        if goes_back:
            restore_rng(rng, device)

    def _begin_generation(self) -> None:
        trainer = self._trainer
        count_ranks(trainer.accelerator)
        for name in ("is_local_process_zero", "is_world_process_zero"):
            setattr(trainer.state, name, getattr(trainer, name)())
        self._counted, self._sender = -1, None

    def _meet(self) -> None:
        """Exchanges, where a step begins, how many steps each rank has counted; once in a
        generation. Later sends a survivor's state to the new members, once. Collective."""
        if (reported := self._loop.meet(self._trainer.state.global_step)) is not None:
            counted = [steps if knows else -1 for knows, steps in reported]
            self._counted = max(counted)
            self._sender = counted.index(self._counted) if self._counted >= 0 else None
        if (sender := self._sender) is not None and self._loop.step == self._counted:
            self._sender = None
            if (state := self._loop.send(sender, self._recorder.state)) is not None:
                self._recorder.take(state)

    def _run_again(self, number: int) -> Tensor:
        """Runs the step after `number` finished steps again; it may be lost again. Leaves the
        random states of the step's end. Raises CollectiveError if the step was not kept: the script
        is then run again."""
        if (step := self._steps.get(number)) is None:
            counted = self._trainer.state.global_step
            raise CollectiveError(
                f"the job went back to step {number}, Trainer has counted {counted}"
            )
        source, count = iter(step.batches), len(step.batches)
        if step.ranks != present_ranks():
            source, count = self._source_of(number), self._batches_of(step.turns)
        step.batches, items = self._read(source, count)
        step.ranks = present_ranks()
        restore_rng(step.rng, self._engine.device)
        load_schedule(self._trainer, step.schedule)
        return self._run_all(step, items)

    def _read(self, source: Iterator[Any], count: int) -> tuple[list[Any], Any]:
        """Reads batches. Returns these, and the number of their items, which weights the loss."""
        trainer = self._trainer
        read = _base().get_batch_samples.__wrapped__
        batches, items = read(trainer, source, count, trainer.args.device)
        return batches, items

    def _run(self, inputs: Any, items: Any) -> Tensor:
        """Trains on one batch; the last batch of a step ends the step. Returns its part of the
        loss."""
        trainer = self._trainer
        run = _base().training_step.__wrapped__
        loss: Tensor = run(trainer, trainer.model_wrapped, inputs, items)
        return loss

    def _run_all(self, step: _Step, items: Any) -> Tensor:
        """Trains on all batches of a step. Returns the loss."""
        trainer, loss = self._trainer, self._no_loss()
        trainer.current_gradient_accumulation_steps = count = len(step.batches)
        for turn, inputs in enumerate(step.batches, 1):
            trainer.accelerator.sync_gradients = turn == count
            loss = loss + self._run(_copy_batch(inputs), items)
        return loss

    def _no_loss(self) -> Tensor:
        zero: Tensor = self._trainer._tr_loss.new_zeros(())
        return zero

    def _source_of(self, step: int) -> Iterator[Any]:
        """Returns an iterator over an epoch's batches from `step` on, cut for the present ranks."""
        epoch, done = divmod(step, self._recorder.steps_per_epoch)
        done_batches = done * (self._recorder.parts // dist.get_world_size())
        return read_behind(self._loader, done_batches, epoch, self._engine, agreed=True)

    def _batches_of(self, turns: int) -> int:
        """Returns this rank's number of batches of a step for which Trainer's loop makes that many
        turns. On as many ranks as at the start these are equal, also in an epoch's short last
        step."""
        batches: int = self._recorder.parts // dist.get_world_size()
        return turns if batches == self._trainer.args.gradient_accumulation_steps else batches


def _copy_batch(inputs: Any) -> Any:
    """Copies a batch, but not its tensors: a loss function may remove labels from it."""
    return dict(inputs) if isinstance(inputs, dict) else inputs

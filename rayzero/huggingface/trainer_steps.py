"""The steps of a transformers Trainer whose ranks may change: read, run, and run again where lost.

The number of turns of Trainer's loop is fixed, and so is the number of batches that it takes in
each. So what a `FollowedLoop` reads again is run within the turn, and a step over other ranks than
those that the loop has begun on runs all of this rank's batches in the last turn of the step. A
step that Trainer has counted is run again without what Trainer did after it, which stands.

New members begin with the loop's first turn, without what Trainer knows of earlier steps: they get
it from a survivor where both read the batches of a step. If the job has gone back, that is after
the last step that a survivor has counted: until then survivors run their steps again, new members
run them for the first time, and log, save and evaluate nothing, as the survivors have.
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
    """Whether the steps of a Trainer can be run again: not if its class makes the inputs, or the
    step, in another way than transformers'; nor if it counts tokens in collectives for each
    batch."""
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
        batches: that it has read, as one of `ranks`: its rank and the world size then.
        turns: of Trainer's loop.
        rng, schedule: the states with which it began; `schedule` is None where the engine has it.
        turn: the present one, from 1.
        given: the sum of the losses that Trainer has got.
    """

    batches: list[Any]
    ranks: tuple[int, int]
    turns: int
    rng: dict[str, Any]
    schedule: dict[str, Any] | None
    turn: int = 0
    given: Tensor | float = 0.0


class TrainerSteps:
    """The steps of one call of `train`, in its training thread."""

    def __init__(
        self, trainer: Any, session: JobSession, engine: Engine, recorder: Recorder
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._recorder = recorder
        self._loader = trainer.callback_handler.train_dataloader
        self._iterator: Iterator[Any] | None = None  # Trainer's, of the epoch
        self._source: Iterator[Any] = iter(())
        self._loop = FollowedLoop(session, engine)
        self._steps: dict[int, _Step] = self._loop.kept
        self._counted = -1
        """Steps that a survivor had counted when it came to this generation; -1 in the first."""
        self._sender: int | None = None
        """The rank that sends its state to new members, once all are where it is."""

    @property
    def broken(self) -> str:
        """Why a rank is missing; empty if none is."""
        return self._engine.survival.local_reason

    @property
    def is_quiet(self) -> bool:
        """Whether a survivor has done what Trainer does after the step that it has counted last."""
        counted: int = self._trainer.state.global_step
        return counted <= self._counted

    def read(self, iterator: Iterator[Any], count: int) -> tuple[list[Any], Any]:
        """Does what `get_batch_samples` does: returns as many batches as Trainer asks for, and
        reads those of this rank's part of the step."""
        self._await_ranks()
        step: int = self._trainer.state.global_step
        if iterator is not self._iterator:
            if self._iterator is not None:  # an epoch is cut where its first batch is read
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
        """Does what `training_step` does. The sum of a step's results is the loss of the global
        batch, so that what Trainer logs does not depend on ranks that are lost before it does."""
        number: int = self._trainer.state.global_step
        step, engine = self._steps[number], self._engine
        if not step.turn:
            step.rng = capture_rng(engine.device)
        step.turn += 1
        is_last = step.turn == step.turns
        if len(step.batches) == step.turns:
            loss = self._run(inputs, items)
        elif is_last:
            loss = self._run_all(step.batches, items)
        else:
            loss = self._trainer._tr_loss.new_zeros(())
        if not is_last:
            step.given = step.given + loss
            return loss
        while self._loop.has_changed:
            self._await_ranks()
            loss = self._run_again(number)
        if (told := engine.metrics.loss) is not None:
            loss = self._trainer._tr_loss.new_tensor(told) - step.given  # in its sum's dtype
        return loss

    def _await_ranks(self) -> None:
        """Waits for all ranks, and runs the steps again behind which the job has gone back."""
        device = self._engine.device
        rng, goes_back = capture_rng(device), False  # the engine goes back to the restored ones
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
        """All ranks meet where a step begins: once in a generation to find out where each is, and
        once to give a survivor's state to the new members. Collective."""
        if (reported := self._loop.meet(self._trainer.state.global_step)) is not None:
            counted = [steps if knows else -1 for knows, steps in reported]
            self._counted = max(counted)
            self._sender = counted.index(self._counted) if self._counted >= 0 else None
        if (sender := self._sender) is not None and self._loop.step == self._counted:
            self._sender = None
            if (state := self._loop.send(sender, self._recorder.state)) is not None:
                self._recorder.take(state)

    def _run_again(self, number: int) -> Tensor:
        """Runs the step that follows `number` finished ones; it may be lost again. Leaves the
        random states of its end. Raises CollectiveError if it was not kept: the script is run
        again."""
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
        return self._run_all(step.batches, items)

    def _read(self, source: Iterator[Any], count: int) -> tuple[list[Any], Any]:
        """Reads batches; also returns the number of their items, which weights the loss."""
        trainer = self._trainer
        read = _base().get_batch_samples.__wrapped__
        batches, items = read(trainer, source, count, trainer.args.device)
        return batches, items

    def _run(self, inputs: Any, items: Any) -> Tensor:
        """Trains on one batch; the last one of a step ends it. Returns its part of the loss."""
        trainer = self._trainer
        run = _base().training_step.__wrapped__
        loss: Tensor = run(trainer, trainer.model_wrapped, inputs, items)
        return loss

    def _run_all(self, batches: list[Any], items: Any) -> Tensor:
        """Trains on all batches of a step. Returns the loss."""
        trainer = self._trainer
        loss: Tensor = trainer._tr_loss.new_zeros(())
        trainer.current_gradient_accumulation_steps = count = len(batches)
        for turn, inputs in enumerate(batches, 1):
            trainer.accelerator.sync_gradients = turn == count
            loss = loss + self._run(_copy_batch(inputs), items)
        return loss

    def _source_of(self, step: int) -> Iterator[Any]:
        """The batches of an epoch from `step` on, cut for the present ranks."""
        epoch, done = divmod(step, self._recorder.steps_per_epoch)
        behind = done * (self._recorder.parts // dist.get_world_size())
        return read_behind(self._loader, behind, epoch, self._engine, agreed=True)

    def _batches_of(self, turns: int) -> int:
        """Number of this rank's batches of a step for which Trainer's loop makes so many turns:
        less at an epoch's end, where Trainer's own number is right."""
        batches: int = self._recorder.parts // dist.get_world_size()
        return turns if batches == self._trainer.args.gradient_accumulation_steps else batches


def _copy_batch(inputs: Any) -> Any:
    """Copies a batch, but not its tensors: a loss function may remove labels from it."""
    return dict(inputs) if isinstance(inputs, dict) else inputs

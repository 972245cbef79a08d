"""Follows each micro-batch from the loader that yields it to its backward.

A training loop may read ahead: `list(loader)`, `itertools.pairwise`, a prefetching thread. What was
yielded last is then not what is trained on. Each micro-batch therefore keeps its own weight and
samples until a backward claims it:

- by its tensors: the engine's forward recognizes those that the loader yielded, and views of them;
- by order, where the loop has made other tensors of them: the oldest that is not trained on yet.
  Their number is all that tells then: a batch that is trained on twice makes up for one that was
  read ahead and left.

Micro-batches are trained on in the order in which they were yielded, each once. Where a loop is
seen to do otherwise, the backward is refused: the order of samples, the weights of the gradient and
the position that a checkpoint resumes from would no longer be those of the samples trained on.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import islice
from threading import Lock, Thread, current_thread
from typing import Any

from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from rayzero.engine.data.prefetch import closed_error
from rayzero.engine.data.sampling import StepSplit, TrainingProgress
from rayzero.engine.data.yielded_batch import StaleBatches, YieldedBatch
from rayzero.engine.errors import EngineError
from rayzero.engine.session import HostSession
from rayzero.engine.tensor_tree import iter_tensors

log = logging.getLogger("rayzero.engine")

_CONTRACT = (
    "one backward() (or several) and one step() for each batch that the loader yields, in its order"
)


class MicroBatches:
    """The micro-batches of one engine that were yielded and not trained on.

    The loader may be advanced by another thread than the training thread. The lock orders what that
    thread yields with the beginning of a newer iteration; the training thread removes from the
    queue, after `progress` has advanced.

    Attributes:
        split: that of the present ranks.
        stale: what the loop had read before the ranks changed.
        progress: the engine's; `micro_batch_weight` is that of batches that the script makes.
        session: gets the samples of each micro-batch that was trained on, before its step's vote.
    """

    def __init__(
        self,
        progress: TrainingProgress,
        split: StepSplit,
        session: HostSession | None = None,
    ) -> None:
        self.progress = progress
        self.split = split
        self.stale = StaleBatches()
        self.session = session
        self._lock = Lock()
        self._iteration = 0  # number of the newest one
        self._reader: Thread | None = None  # the one that advances it
        self._untrained: deque[YieldedBatch] = deque()
        self._forwarded: list[YieldedBatch] = []  # by tensors, since the last backward
        self._current: YieldedBatch | None = None  # has had a backward, and no step()
        self._trained: YieldedBatch | None = None  # the last one that was trained on
        self._read_to_end = False  # the last iteration yielded all of its micro-batches
        self._promised: YieldedBatch | None = None  # a newer iteration begins behind it
        self._took_by_order = False  # a backward's micro-batch was not known by its tensors
        self._other_weight: float | None = None  # of another engine's loader, as in a GAN

    # The loader's side

    def begin_iteration(self) -> tuple[int, int, int]:
        """Begins an iteration: (its number, the sample cursor of its first step, micro-batches to
        leave out of that). It begins at what was not trained on; but behind that, if the last
        iteration was read to its end, by the same thread, and its last batch is still held: the
        loop has read ahead. How far another thread has read differs between the ranks."""
        with self._lock:
            cursor, done = self.next_place()
            if not self._is_ahead:
                left_out = [it for it in self._untrained if it is not self._current]
                if left_out and self._is_shifted:
                    raise self._left_out_error(len(left_out))
                for _ in left_out:
                    self._untrained.pop()
            self._read_to_end = False
            self._iteration += 1
            self._reader = current_thread()
            return self._iteration, cursor, done

    def add(self, iteration: int, yielded: YieldedBatch, batch: Any) -> None:
        """An iteration is about to yield `batch`. Raises EngineError if it is not the newest."""
        with self._lock:
            if iteration != self._iteration:
                raise closed_error()
            for tensor in iter_tensors(batch):
                # A tensor that several of them share, such as a constant mask, identifies none.
                _by_tensor[tensor] = None if tensor in _by_tensor else yielded
                yielded.tensors.append(TensorWeakRef(tensor))
            is_stale = yielded.split is not self.split  # of a thread that reads ahead
            (self.stale.waiting if is_stale else self._untrained).append(yielded)

    def end_iteration(self, iteration: int) -> None:
        """An iteration has yielded all of its micro-batches."""
        with self._lock:
            self._read_to_end = iteration == self._iteration

    def next_place(self) -> tuple[int, int]:
        """The place where the next iteration begins: behind what was not trained on, if the loop is
        ahead; then it is an error if the loop ends without training on that."""
        if self._is_ahead:
            self._promised = self._untrained[-1]
            return self._behind(self._promised)
        last = self._current or self._trained
        if last is not None and last.position[0] == self.progress.sample_cursor:
            return self._behind(last)
        return self.progress.sample_cursor, self.progress.micro_step

    @property
    def _is_ahead(self) -> bool:
        """Whether the loop is training on what the last iteration has yielded."""
        if not self._read_to_end or self._reader is not current_thread():
            return False
        # What is not known by its tensors may still be trained on without them.
        return bool(self._untrained) and (self._untrained[-1].is_held or self._took_by_order)

    @property
    def _is_shifted(self) -> bool:
        """Whether micro-batches that are left had others trained on in their place: all of the
        iteration was read, and only their order could tell which a backward was of."""
        return self._read_to_end and self._took_by_order

    def _behind(self, yielded: YieldedBatch) -> tuple[int, int]:
        cursor, turn = yielded.position
        return (cursor + self.progress.global_batch, 0) if yielded.is_last else (cursor, turn + 1)

    # The engine's side

    def on_forward(self, inputs: Any) -> None:
        """The model's forward was called with `inputs`, with gradients enabled."""
        for tensor in iter_tensors(inputs):
            base = tensor._base
            yielded = _by_tensor.get(tensor)
            if yielded is None and base is not None:
                yielded = _by_tensor.get(base)
            if yielded is None:
                continue
            if yielded.progress is not self.progress:
                self._other_weight = yielded.weight
                return
            self.stale.is_next = yielded.split is not self.split
            if not self.stale.is_next:
                self.stale.waiting.clear()  # micro-batches are trained on in their order
                if yielded not in self._forwarded:
                    self._forwarded.append(yielded)
            return
        self.stale.is_next = bool(self.stale.waiting)

    def begin_backward(self, *, step_due: bool) -> float:
        """The weight of the loss whose backward begins.

        Args:
            step_due: the engine expects a step() between two micro-batches. Not inside no_sync(),
                nor where the script declares the end of a step itself.

        Raises:
            EngineError: a micro-batch was left out or trained on twice, or a step() is missing.
        """
        if self.stale.is_next:
            return self.progress.micro_batch_weight
        yielded = self._choose(step_due=step_due)
        if yielded is None:
            other = self._other_weight
            return self.progress.micro_batch_weight if other is None else other
        if yielded is self._current:
            return yielded.weight
        if self._current is not None:
            if step_due:
                raise EngineError(
                    f"backward() of {yielded} came before the step() of {self._current}",
                    allowed=f"{_CONTRACT}; the weights change at the last one of a step only",
                    fix="engine.step() after each backward, without a condition such as "
                    "`if (i + 1) % gradient_accumulation_steps == 0`",
                )
            self._report(self._current)
            self._advance()
        self._check_turn(yielded)
        self._current = self._untrained[0]
        return yielded.weight

    @property
    def can_read_again(self) -> bool:
        """Whether the loop can get the samples of what it is training on once more: not if it has
        read its iteration to the end, as `list(loader)` does, or another thread reads ahead."""
        return not ((self._read_to_end and self._untrained) or self.reads_in_other_thread)

    @property
    def reads_in_other_thread(self) -> bool:
        """Whether another thread than the caller's advances the loader."""
        return self._reader not in (None, current_thread())

    @property
    def is_read_where_steps_begin(self) -> bool:
        """Whether this thread reads a batch before the next step, and asks for another group then
        if this one is broken."""
        has_untrained = bool(self._untrained or self.stale.waiting)
        return has_untrained and not self.reads_in_other_thread

    @property
    def can_divide_anew(self) -> bool:
        """Whether this thread has read nothing after the micro-batch of the last backward."""
        has_read_ahead = len(self._untrained) > 1 or bool(self.stale.waiting)
        return self.from_loader and not has_read_ahead and not self.reads_in_other_thread

    @property
    def from_loader(self) -> bool:
        """Whether the batch of the last backward, whose step() has not ended, is the loader's."""
        return self._current is not None

    def begin_step(self, *, ends_step: bool) -> None:
        """A step() begins: reports the samples of its micro-batch. Raises EngineError if a step
        ends that has not had all of its micro-batches."""
        current = self._current
        if current is None:
            return
        is_its_last = current.is_last and current.position[0] == self.progress.sample_cursor
        if ends_step and not is_its_last:
            raise EngineError(
                f"a step ended with {current}, which is not the last one of step "
                f"{self.progress.step + 1}",
                allowed="as many micro-batches a step as gradient_accumulation_steps says, or "
                "batches that the script makes itself",
                fix="gradient_accumulation_steps in the config, or where the step ends",
            )
        self._report(current)

    def end_step(self) -> None:
        """That step() has ended, and `progress` has advanced."""
        if self._current is not None:
            self._advance()

    def forget(self) -> None:
        """Other progress was loaded: iterations begin there."""
        self._untrained.clear()
        self._forwarded.clear()
        self._current = self._trained = self._promised = None
        self._read_to_end = self._took_by_order = False

    def recut(self, split: StepSplit) -> None:
        """Steps are split differently from now on: the running iteration continues from `progress`,
        with the samples of the step that was not finished."""
        with self._lock:
            self.stale.waiting += [it for it in self._untrained if it is not self._current]
            self.forget()
            self.split = split

    def check_end(self) -> None:
        """The training loop has ended. Raises EngineError if micro-batches were left out that only
        their order could tell, because those after them had the wrong weights; or if a newer
        iteration left them out, because it began behind them. Warns if others were left out that
        the loop had read, or if it ended in the middle of a step."""
        current = self._current
        last = current or self._trained
        if last is not None and (last is current or not last.is_last):
            step = "its step() is missing" if last is current else "its step is not finished"
            log.warning("the training loop ended with %s: %s, its gradient is lost", last, step)
        # Without the lock, which the garbage collector may interrupt; a copy is one call of C code.
        left_out = [it for it in list(self._untrained) if it is not current]
        shifted = self._is_shifted
        behind = self._promised in left_out
        was_read = self._read_to_end
        self._trained = self._promised = None  # reported once
        self._took_by_order = self._read_to_end = False
        if not (left_out and (was_read or behind)):
            return
        error = self._left_out_error(len(left_out))
        if shifted or behind:
            raise error
        log.warning("%s", error)

    def _left_out_error(self, number: int) -> EngineError:
        count = f"{number} micro-batch{'es' * (number != 1)}"
        return EngineError(
            f"the loader yielded {count} more than the loop trained on (step() was called for "
            f"{self.progress.step} steps)",
            allowed=_CONTRACT,
            fix="engine.step() after the backward of every micro-batch, and no batch left out: "
            "filter the dataset, or end the training with loader.until(step)",
        )

    def warn_at_end(self) -> None:
        """Calls `check_end`, and logs its error where no caller is left to handle it."""
        try:
            self.check_end()
        except EngineError as error:
            log.warning("%s", error)

    def _choose(self, *, step_due: bool) -> YieldedBatch | None:
        """The micro-batch of a backward; None for a batch that the script has made."""
        if self._forwarded:
            return self._forwarded.pop(0)
        with self._lock:
            ahead = list(islice(self._untrained, 2))  # the current one is first, until it ends
        if self._current is not None and (step_due or len(ahead) < 2):
            return self._current
        if ahead:
            self._took_by_order = True
            return ahead[self._current is not None]
        if self._trained is None:
            return None
        raise EngineError(
            f"backward() of a batch that the loader has not yielded, after {self._trained}",
            allowed=_CONTRACT,
            fix="loader.until(step) or loader.epochs(count) for more than one epoch; without "
            "training_data=... the script makes all of its batches itself",
        )

    def _check_turn(self, yielded: YieldedBatch) -> None:
        """Raises EngineError unless `yielded` is the oldest that was not trained on."""
        expected = self._untrained[0] if self._untrained else None
        if expected is not None and yielded.position == expected.position:
            return
        if expected is not None and yielded.position > expected.position:
            raise EngineError(
                f"{expected} was read and not trained on: {yielded} is",
                allowed=_CONTRACT,
                fix="filter the dataset to leave samples out; a step whose gradient is not finite "
                "is skipped by the engine",
            )
        raise EngineError(
            f"backward() of {yielded}, which was trained on before",
            allowed=f"{_CONTRACT}; several losses of one batch before its step()",
            fix="loader.until(step) or loader.epochs(count) instead of itertools.cycle; without "
            "training_data=... the script makes its batches, and may use them again",
        )

    def _report(self, current: YieldedBatch) -> None:
        self.progress.bad_in_step += len(current.skipped)
        if self.session is not None:
            self.session.on_samples_consumed(current.own_indices)
            if current.skipped:
                self.session.on_samples_skipped(current.skipped)

    def _advance(self) -> None:
        self._trained, self._current = self._current, None
        self._untrained.popleft()
        trained = self._trained
        self._forwarded = [it for it in self._forwarded if it is not trained]


_by_tensor: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The micro-batch of each tensor that a loader has yielded, as long as the tensor lives; None for
one of several micro-batches."""

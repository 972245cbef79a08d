"""Follows each micro-batch from the loader that yields it to its backward.

A training loop may read ahead: `list(loader)`, `itertools.pairwise`, a prefetching thread. The
batch that was yielded last is then not the one that is trained on. Each micro-batch therefore keeps
its own weight and samples until a backward claims it:

- by its tensors: the engine's forward recognizes those that the loader yielded, and views of them;
- by order, if the loop has made other tensors of the batch: a backward claims the oldest
  micro-batch that is not trained on yet. Only the number of backwards can show a mistake then: a
  batch that is trained on twice makes up for one that was read and left out.

Micro-batches are trained on in the order in which they were yielded, each once. If a loop is seen
to do otherwise, the backward is refused: the order of samples, the weights of the gradient and the
position that a checkpoint resumes from would no longer be those of the samples trained on.
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
from rayzero.engine.session import NO_HOST, HostSession
from rayzero.engine.tensor_tree import iter_tensors

log = logging.getLogger("rayzero.engine")

_CONTRACT = (
    "one backward() (or several) and one step() for each batch that the loader yields, in its order"
)


class MicroBatches:
    """The micro-batches of one engine that were yielded and not trained on.

    Another thread than the training thread may advance the loader. The lock orders what that thread
    yields with the beginning of a newer iteration. Only the training thread removes micro-batches
    from the queue, after `progress` has advanced.

    Attributes:
        split: this rank's part of every step, among the present ranks.
        stale: the micro-batches that the loop had read before the ranks changed.
        progress: the engine's; `micro_batch_weight` is that of batches that the script makes.
        session: gets the samples of each micro-batch that was trained on, before its step's vote.
    """

    def __init__(
        self, progress: TrainingProgress, split: StepSplit, session: HostSession = NO_HOST
    ) -> None:
        self.progress = progress
        self.split = split
        self.stale = StaleBatches()
        self.session = session
        self._lock = Lock()
        self._iteration = 0  # number of the newest iteration
        self._reader: Thread | None = None  # the thread that advances the newest iteration
        self._untrained: deque[YieldedBatch] = deque()
        self._forwarded: list[YieldedBatch] = []  # recognized by tensors since the last backward
        self._current: YieldedBatch | None = None  # has had a backward; its step() has not ended
        self._trained: YieldedBatch | None = None  # the last one that was trained on
        self._read_to_end = False  # whether the last iteration yielded all of its micro-batches
        self._promised: YieldedBatch | None = None  # a newer iteration begins after it
        self._took_by_order = False  # whether a backward claimed its micro-batch by order
        self._other_weight: float | None = None  # of a batch of another engine's loader: a GAN

    # The loader's side

    def begin_iteration(self) -> tuple[int, int, int]:
        """Begins an iteration. Returns (its number, the sample cursor of its first step, the number
        of micro-batches to leave out of that step).

        It begins at the oldest micro-batch that was not trained on. If the loop has read ahead, it
        begins after all of them: the same thread has read the last iteration to its end, and the
        script holds its last batch. What another thread has read does not count, because it differs
        between the ranks. Raises EngineError, as `check_end`, if backwards claimed wrong ones.
        """
        with self._lock:
            cursor, done = self.next_place()
            if not self._is_ahead:
                left_out = [batch for batch in self._untrained if batch is not self._current]
                if left_out and self._is_shifted:
                    raise self._left_out_error(len(left_out))
                for _ in left_out:
                    self._untrained.pop()
            self._read_to_end = False
            self._iteration += 1
            self._reader = current_thread()
            return self._iteration, cursor, done

    def add(self, iteration: int, yielded: YieldedBatch, batch: Any) -> None:
        """Called before an iteration yields `batch`. Raises EngineError if there is a newer one."""
        with self._lock:
            if iteration != self._iteration:
                raise closed_error()
            for tensor in iter_tensors(batch):
                # A tensor that several batches share, such as a constant mask, identifies none.
                _by_tensor[tensor] = None if tensor in _by_tensor else yielded
                yielded.tensors.append(TensorWeakRef(tensor))
            is_stale = yielded.split is not self.split  # a thread of the script reads ahead
            (self.stale.waiting if is_stale else self._untrained).append(yielded)

    def end_iteration(self, iteration: int) -> None:
        """Called when an iteration has yielded all of its micro-batches."""
        with self._lock:
            self._read_to_end = iteration == self._iteration

    def next_place(self) -> tuple[int, int]:
        """Returns the place where the next iteration begins: (sample cursor of its step, number of
        the micro-batch in that). If the loop has read ahead, this is after all micro-batches that
        were read, and `check_end` raises if the loop ends without training on them."""
        if self._is_ahead:
            self._promised = self._untrained[-1]
            return self._place_after(self._promised)
        last = self._current or self._trained
        if last is not None and last.position[0] == self.progress.sample_cursor:
            return self._place_after(last)
        return self.progress.sample_cursor, self.progress.micro_step

    @property
    def _is_ahead(self) -> bool:
        """Whether the loop has read the last iteration to its end, and is still training on it."""
        if not self._read_to_end or self._reader is not current_thread():
            return False
        # A batch whose tensors are gone may still be trained on: the loop has made others of it.
        return bool(self._untrained) and (self._untrained[-1].is_held or self._took_by_order)

    @property
    def _is_shifted(self) -> bool:
        """Whether backwards have claimed the wrong micro-batches, if some are left out: all of the
        iteration was read, and only order could tell which micro-batch a backward was of."""
        return self._read_to_end and self._took_by_order

    def _place_after(self, yielded: YieldedBatch) -> tuple[int, int]:
        cursor, turn = yielded.position
        return (cursor + self.progress.global_batch, 0) if yielded.is_last else (cursor, turn + 1)

    # The engine's side

    def on_forward(self, inputs: Any) -> None:
        """Called when the model's forward is called with `inputs`, with gradients enabled."""
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
                self.stale.waiting.clear()  # trained on in order: no stale batch follows this one
                if yielded not in self._forwarded:
                    self._forwarded.append(yielded)
            return
        self.stale.is_next = bool(self.stale.waiting)

    def begin_backward(self, *, step_due: bool) -> float:
        """Returns the weight of the loss whose backward begins.

        Args:
            step_due: whether the engine expects a step() between two micro-batches: not inside
                no_sync(), nor if the script declares the end of a step itself.

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
        """Whether the loop can read the samples of the current step once more: not if it has read
        its iteration to the end, as `list(loader)` does, or another thread reads ahead."""
        return not ((self._read_to_end and self._untrained) or self.reads_in_other_thread)

    @property
    def reads_in_other_thread(self) -> bool:
        """Whether another thread than the caller's advances the loader."""
        return self._reader not in (None, current_thread())

    @property
    def is_read_where_steps_begin(self) -> bool:
        """Whether this thread reads a batch before the next step. If the process group is broken,
        it asks for another one then."""
        has_untrained = bool(self._untrained or self.stale.waiting)
        return has_untrained and not self.reads_in_other_thread

    @property
    def can_divide_anew(self) -> bool:
        """Whether this thread has read nothing after the micro-batch of the last backward."""
        has_read_ahead = len(self._untrained) > 1 or bool(self.stale.waiting)
        return self.from_loader and not has_read_ahead and not self.reads_in_other_thread

    @property
    def from_loader(self) -> bool:
        """Whether the last backward, whose step() has not ended, was of a batch of the loader."""
        return self._current is not None

    def begin_step(self, *, ends_step: bool) -> None:
        """Called when a step() begins: reports the samples of its micro-batch. Raises EngineError
        if it ends a step of which not all micro-batches were trained on."""
        current = self._current
        if current is None:
            return
        is_last_of_step = current.is_last and current.position[0] == self.progress.sample_cursor
        if ends_step and not is_last_of_step:
            raise EngineError(
                f"a step ended with {current}, which is not the last one of step "
                f"{self.progress.step + 1}",
                allowed="as many micro-batches a step as gradient_accumulation_steps says, or "
                "batches that the script makes itself",
                fix="gradient_accumulation_steps in the config, or where the step ends",
            )
        self._report(current)

    def end_step(self) -> None:
        """Called when that step() has ended, and `progress` has advanced."""
        if self._current is not None:
            self._advance()

    def forget(self) -> None:
        """Called when other progress was loaded: the next iteration begins there."""
        self._untrained.clear()
        self._forwarded.clear()
        self._current = self._trained = self._promised = None
        self._read_to_end = self._took_by_order = False

    def recut(self, split: StepSplit) -> None:
        """Splits steps differently from now on. The running iteration continues from `progress`,
        with the samples of the step that was not finished."""
        with self._lock:
            left = [batch for batch in self._untrained if batch is not self._current]
            self.stale.waiting += left
            self.forget()
            self.split = split

    def check_end(self) -> None:
        """Called when the training loop has ended. Warns if it ended in the middle of a step, or
        left out micro-batches that it had read. Raises EngineError if backwards claimed
        micro-batches by order, because those after a left-out one had the wrong weights; or if a
        newer iteration began after those that were left out."""
        current = self._current
        last = current or self._trained
        if last is not None and (last is current or not last.is_last):
            step = "its step() is missing" if last is current else "its step is not finished"
            log.warning("the training loop ended with %s: %s, its gradient is lost", last, step)
        # Without the lock: the garbage collector may call this in a thread that holds it. No other
        # thread interrupts the copy, which is one call of C code.
        left_out = [batch for batch in list(self._untrained) if batch is not current]
        shifted = self._is_shifted
        passed_over = self._promised in left_out
        was_read = self._read_to_end
        self._trained = self._promised = None  # reported once
        self._took_by_order = self._read_to_end = False
        if not (left_out and (was_read or passed_over)):
            return
        error = self._left_out_error(len(left_out))
        if shifted or passed_over:
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
        """Calls `check_end`, and logs its error, because no caller is left to handle it."""
        try:
            self.check_end()
        except EngineError as error:
            log.warning("%s", error)

    def _choose(self, *, step_due: bool) -> YieldedBatch | None:
        """Returns the micro-batch of a backward; None if the script has made its batch."""
        if self._forwarded:
            return self._forwarded.pop(0)
        with self._lock:
            ahead = list(islice(self._untrained, 2))  # `_current` is first, until its step() ends
        if self._current is not None and (step_due or len(ahead) < 2):
            return self._current
        if ahead:
            self._took_by_order = True
            return ahead[0] if self._current is None else ahead[1]
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
        self.session.on_samples_consumed(current.own_indices)
        if current.skipped:
            self.session.on_samples_skipped(current.skipped)

    def _advance(self) -> None:
        self._trained, self._current = self._current, None
        self._untrained.popleft()
        self._forwarded = [batch for batch in self._forwarded if batch is not self._trained]


_by_tensor: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The micro-batch of each tensor that a loader has yielded, as long as the tensor lives; None for a
tensor of several micro-batches."""

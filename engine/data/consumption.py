"""Training on the samples of a log that other processes write while the job runs: rollouts.

The log is read by position, as a dataset is. The sample at a position is not known in advance, so
the training state has the sample cursor and the set of the prompts that were consumed before it.
If the log is lost, the rest of it is written again from that set. Each prompt is trained on exactly
once, however often the job went back or the log was lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rayzero.engine.data.consumed import Consumed
from rayzero.engine.data.sample_source import Register, SampleSource
from rayzero.engine.data.sampling import MicroBatch, StepSplit, TrainingProgress
from rayzero.engine.errors import ConfigError, EngineError

STATE_NAME = "rayzero.rollouts"
"""The name of the registered state with the consumed prompts."""


class SampleLog(Protocol):
    """A log of groups of samples, each group of one prompt. All positions are in samples.

    Every method may wait for the processes that write the log. While it waits, it calls `check` at
    least every second; `check` raises if reading is to stop.

    Attributes:
        length: number of samples of an epoch: its prompts times `group`.
        group: number of samples of one prompt, which are adjacent.
    """

    length: int
    group: int

    def open(self, consumed: Consumed, check: Callable[[], None]) -> None:
        """Opens the log for reading after its first `len(consumed)` groups. If these are not
        exactly the groups of `consumed`, the log is replaced by one that is written from there on.
        """

    def read(self, start: int, count: int, check: Callable[[], None]) -> list[tuple[int, Any]]:
        """Returns the samples at `start` to `start + count - 1`, each with a unique number: the
        number of its prompt times `group`, plus its index in the group."""

    def consumed_at(self, position: int, check: Callable[[], None]) -> Consumed:
        """Returns the prompts before `position`, which is a multiple of `group`."""


class LogSource(SampleSource):
    """A log as the source of a `StepLoader`. The consumed prompts are registered with the training
    state, so they are mirrored, saved, and loaded at any world size with it.

    The thread that reads ahead fills `_consumed_at`; the training thread reads the entry of a step
    after the step has ended, which is after its last micro-batch was read.

    Args:
        register: the method of the training state.

    Raises:
        ConfigError: `train_batch_size` is not a multiple of the samples of a prompt.
    """

    may_wait = True

    def __init__(self, log: SampleLog, progress: TrainingProgress, register: Register) -> None:
        if progress.global_batch % log.group:
            raise ConfigError(
                f"train_batch_size is {progress.global_batch} samples, with {log.group} samples of "
                "each prompt",
                allowed="a multiple of the samples of a prompt",
                fix="train_batch_size, or `group` of the rollouts",
            )
        self.length = log.length
        self._log = log
        self._progress = progress
        # By the sample cursors at which steps end.
        self._consumed_at: dict[int, Consumed] = {0: Consumed()}
        register(STATE_NAME, self._get, self._set)

    def begin(self, cursor: int, split: StepSplit, check: Callable[[], None]) -> None:
        self._log.open(self._consumed(cursor), check)

    def read(
        self, step: int, part: MicroBatch, *, is_last: bool, check: Callable[[], None]
    ) -> tuple[list[int], list[Any]]:
        samples = self._log.read(step + part.start, part.read_count, check)
        if is_last:
            batch = self._progress.global_batch
            self._consumed_at[step + batch] = self._log.consumed_at(step + batch, check)
            oldest = self._progress.sample_cursor - batch  # a step may be lost after it has ended
            for cursor in list(self._consumed_at):
                if cursor < oldest:
                    del self._consumed_at[cursor]
        return [number for number, _ in samples], [sample for _, sample in samples]

    def _consumed(self, cursor: int) -> Consumed:
        consumed = self._consumed_at.get(cursor)
        if consumed is None or len(consumed) * self._log.group != cursor:
            seen = "no prompts" if consumed is None else f"{len(consumed)} prompts"
            raise EngineError(
                f"the training state counts {cursor} samples, and {seen} of these rollouts, with "
                f"{self._log.group} samples of each",
                allowed="to continue a run of the same rollouts, or to begin with step 0",
                fix="load only the weights of another run's checkpoint",
            )
        return consumed

    def _get(self) -> dict[str, Any]:
        consumed = self._consumed(self._progress.sample_cursor)
        return {"frontier": consumed.frontier, "extras": sorted(consumed.extras)}

    def _set(self, value: dict[str, Any]) -> None:
        consumed = Consumed(value["frontier"], frozenset(value["extras"]))
        self._consumed_at = {self._progress.sample_cursor: consumed}

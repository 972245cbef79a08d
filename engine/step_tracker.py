"""The phases of one optimizer step.

One step is any number of micro-steps (forward, backward, `step()`), the last of which updates the
weights:

    EMPTY -> BACKWARD -> STEP_PENDING -> ACCUMULATING -> BACKWARD -> STEP_PENDING -> UPDATING ->
    EMPTY

A micro-step may have several backwards (the losses of a GAN), by `engine.backward(loss)` or by the
loss's own `backward()`: their gradients add up. Each backward reduces as if it were the last of the
micro-step, since the engine cannot know that. Inside `no_sync()`, and where the script declared
that a micro-step is not the last one, backward leads to ACCUMULATING directly, because no `step()`
is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from rayzero.engine.errors import EngineError


class StepPhase(Enum):
    """State of the main gradients between and within calls of the script."""

    EMPTY = "no gradients of this step yet"
    BACKWARD = "backward() is running"
    STEP_PENDING = "backward() has run, step() is due"
    ACCUMULATING = "gradients of earlier micro-steps are held, backward() is due"
    UPDATING = "step() is updating the weights"


_NEXT = {
    StepPhase.EMPTY: {StepPhase.BACKWARD, StepPhase.EMPTY},
    StepPhase.BACKWARD: {StepPhase.STEP_PENDING, StepPhase.ACCUMULATING, StepPhase.EMPTY},
    StepPhase.STEP_PENDING: {
        StepPhase.BACKWARD,
        StepPhase.ACCUMULATING,
        StepPhase.UPDATING,
        StepPhase.EMPTY,
    },
    StepPhase.ACCUMULATING: {StepPhase.BACKWARD, StepPhase.EMPTY},
    StepPhase.UPDATING: {StepPhase.EMPTY, StepPhase.ACCUMULATING},
}
"""The phases that may follow each phase. EMPTY may follow all: loading a checkpoint discards
gradients. A failed backward or update returns to the phase in which the script may call backward
again."""


class Boundary(Enum):
    """Who decides whether a micro-step is the last of its step."""

    COUNTED = "the engine counts gradient_accumulation_steps"
    LAST = "the script declared the next micro-step the last"
    NOT_LAST = "the script declared that more micro-steps follow"
    STEP = "every step() ends a step: managed_gradient_accumulation is false"


class StepTracker:
    """Follows one engine through its steps. Used by the training thread."""

    def __init__(self) -> None:
        self._phase = StepPhase.EMPTY
        self.boundary = Boundary.COUNTED
        self.no_sync = False  # inside `Engine.no_sync()`
        self.applied = False  # whether the last `step()` changed the weights
        self.lost = False  # the last `step()` ended a step that was lost with its process group
        self.zeroed = False  # `zero_grad()` since the last backward, and no `step()`
        self.unstepped = False  # no `step()` since the last backward
        self.backwards = 0  # number of finished backwards of this step
        # Where the script declares the ends of steps: by how many the calls of step() exceed
        # `gradient_accumulation_steps` per step; negative where there were fewer.
        self.uncounted_micro_steps = 0
        self._before = self._phase

    @property
    def phase(self) -> StepPhase:
        return self._phase

    @phase.setter
    def phase(self, phase: StepPhase) -> None:
        if phase not in _NEXT[self._phase]:  # a defect of the engine; a script's are EngineErrors
            raise RuntimeError(f"the step cannot go from {self._phase.name} to {phase.name}")
        if phase is StepPhase.EMPTY:
            self.backwards = 0
        self._phase = phase

    @property
    def has_gradients(self) -> bool:
        """Whether a backward of this step has run."""
        return self.phase in (StepPhase.STEP_PENDING, StepPhase.ACCUMULATING, StepPhase.UPDATING)

    @property
    def step_pending(self) -> bool:
        return self.phase is StepPhase.STEP_PENDING

    @property
    def follows_no_sync(self) -> bool:
        """Whether a `step()` would be the first after a backward in an ended `no_sync()`."""
        accumulating = self.phase is StepPhase.ACCUMULATING
        return accumulating and self.unstepped and not self.no_sync

    @property
    def updating(self) -> bool:
        return self.phase is StepPhase.UPDATING

    @property
    def skips_step(self) -> bool:
        """Whether `step()` has nothing to do, because the script declared that more micro-steps
        follow."""
        return self.boundary is Boundary.NOT_LAST and not self.no_sync

    def zero_grad(self) -> None:
        """If there was no `step()` since the last backward, makes the next backward forget the
        gradients of this step: also inside `no_sync()`, and where more micro-steps were declared to
        follow. Else does nothing: the first backward of a step replaces the previous step's
        gradients."""
        self.zeroed = self.unstepped and self.has_gradients

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """See `Engine.no_sync`."""
        if self.no_sync:
            raise EngineError(
                "no_sync() was entered inside no_sync()",
                fix="use one no_sync() around all backwards",
            )
        self.no_sync = True
        try:
            yield
        finally:
            self.no_sync = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Encloses one backward. If the backward fails, the script may call it again."""
        self.begin_backward()
        try:
            yield
        except BaseException:
            self.abandon_backward()
            raise
        self.finish_backward()

    def begin_backward(self) -> None:
        self._before = self._phase
        self.phase = StepPhase.BACKWARD

    def abandon_backward(self) -> None:
        self.phase = self._before

    def finish_backward(self) -> None:
        self.unstepped = True
        self.backwards += 1
        deferred = self.no_sync or self.boundary is Boundary.NOT_LAST
        self.phase = StepPhase.ACCUMULATING if deferred else StepPhase.STEP_PENDING

    def abandon_step(self) -> None:
        """Forgets the gradients and micro-steps of this step, which are lost with the process
        group."""
        self._phase = self._before = StepPhase.EMPTY
        self.applied = self.zeroed = self.unstepped = False
        self.lost = True
        self.backwards = 0

    @contextmanager
    def update(self) -> Iterator[None]:
        """Encloses the update at the end of a step. If it fails, gradients are still held."""
        self.phase = StepPhase.UPDATING
        try:
            yield
        except BaseException:
            self.phase = StepPhase.ACCUMULATING
            raise
        self.phase = StepPhase.EMPTY

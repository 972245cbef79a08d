"""A rank's part in one generation, and how a training function comes to the next one.

The members of a generation meet where a training step begins. A new worker has come there from the
function's start, a survivor from the end of a step, so neither may have called a collective that
the other one has not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from rayzero.engine.comm.joining_group import joining_group
from rayzero.workers.chaos.inject import WorkerFaultInjector
from rayzero.workers.messages import Assignment
from rayzero.workers.training_thread import GenerationChannel


@dataclass(frozen=True)
class Membership:
    """This rank's part in one generation, whose process group is forming.

    Attributes:
        await_group: returns when the group has formed; a thread joins it concurrently.
    """

    assignment: Assignment
    channel: GenerationChannel
    injector: WorkerFaultInjector
    await_group: Callable[[], object] = lambda: None


class SessionHost(Protocol):
    """What the process does for a function that outlives its generations."""

    def end_group(self, channel: GenerationChannel, reason: str) -> None:
        """Ends the waits for peers of a generation. By any thread."""

    def await_next(self, *, drained: bool) -> Membership:
        """Leaves the generation, and returns the next one. By the training thread."""


class OwnCollectives:
    """Notices the collectives of the default group that a training function calls itself.

    Compares the group's count of collectives with the engine's, over stretches in which the
    function's own code runs. Where that also calls the engine, some of its own may be overlooked.

    Attributes:
        before_first_step: the function, or the engine for it, has called some before the first
            step.
        are_called: the function has called some.
    """

    def __init__(self) -> None:
        self.before_first_step = False
        self.are_called = False
        # The counts of the group and of the engine where a stretch began; None between two.
        self._begin: tuple[int, int] | None = (0, 0)

    def begin(self, of_engine: int) -> None:
        """The function's code runs from here on; the engine has called `of_engine` so far."""
        self._begin = count_collectives(), of_engine

    def end(self, of_engine: int, *, is_first_step: bool = False) -> None:
        """It has run until here; the engine's passes follow."""
        if self._begin is None:
            return
        called = count_collectives() - self._begin[0]
        called_by_engine = of_engine - self._begin[1]
        self._begin = None
        self.are_called = self.are_called or called > called_by_engine
        if is_first_step and (called or called_by_engine):
            self.before_first_step = True


def count_collectives() -> int:
    """Collectives of the default group so far; 0 without one, or while it forms."""
    if joining_group() is not None or not dist.is_initialized():
        return 0
    group: Any = dist.group.WORLD
    return int(group._get_sequence_number_for_group())

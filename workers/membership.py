"""A rank's part in one generation, and how a training function comes to the next one.

The members of a generation meet where a training step begins: a new worker comes there from the
function's start, a survivor from the end of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rayzero.engine.session import ScriptEpochs
from rayzero.workers.chaos.inject import WorkerFaultInjector
from rayzero.workers.messages import Assignment, Notes
from rayzero.workers.training_thread import GenerationChannel


@dataclass(frozen=True)
class Membership:
    """This rank's part in one generation.

    Attributes:
        join: joins the process group; does nothing where the function was called ahead of the
            generation.
    """

    assignment: Assignment
    channel: GenerationChannel
    injector: WorkerFaultInjector
    join: Callable[[], None] = lambda: None


@dataclass
class ScriptLoop:
    """The known properties of a launched script's loop.

    Attributes:
        yields_again: the loop's loader yields the batches of a lost step again.
        divides_steps: the loader is cut for the present ranks, as Accelerate's and Trainer's are.
        asked_step: step of the last checkpoint that the script has asked for, loaded or not.
        epochs: notified where an iteration over data that is trained on begins and ends.
        own_loaders: an `OwnLoaders`, which follows the script's torch DataLoaders.
        tell: called for a script that does not continue. Returns a number of finished steps, and
            the notes for the script that is run in its place after these.
    """

    yields_again: bool = False
    divides_steps: bool = False
    asked_step: int = 0
    epochs: ScriptEpochs = field(default_factory=ScriptEpochs)
    own_loaders: Any = None
    tell: Callable[[], tuple[int, Any]] | None = None

    @property
    def keeps_rank(self) -> bool:
        """Whether the loop continues only with the same rank and number of ranks: a script's own
        sampler is cut for the ranks at the time of its creation."""
        return self.yields_again and not self.divides_steps


class SessionHost(Protocol):
    """The services of a worker's process for a function that outlives its generations."""

    def end_group(self, channel: GenerationChannel, reason: str) -> None:
        """Ends a generation's waits for peers. Any thread may call this."""

    def await_begin(self) -> Membership:
        """Waits until the generation begins ahead of which the function was called; returns this
        rank's part in it. Called by the training thread."""

    def await_next(self, *, drained: bool, keeps_rank: bool, notes: Notes | None) -> Membership:
        """Leaves the generation, and returns this rank's part in the next one. Called by the
        training thread.

        Args:
            keeps_rank: the function continues only with the same rank and number of ranks.
            notes: for new members.
        """

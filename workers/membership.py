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
from rayzero.workers.messages import Assignment
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
        yields_again: its loader yields the batches of a lost step again.
        divides_steps: its loader is cut for the present ranks, as Accelerate's and Trainer's are.
        asked_step: of the last checkpoint that the script has asked for, loaded or not.
        epochs: notified where an iteration over data that is trained on begins and ends.
        own_loaders: follows its torch DataLoaders, an `OwnLoaders`.
        tell: returns what the script, if it does not continue, tells the one that is run in its
            place, and after how many finished steps.
    """

    yields_again: bool = False
    divides_steps: bool = False
    asked_step: int = 0
    epochs: ScriptEpochs = field(default_factory=ScriptEpochs)
    own_loaders: Any = None
    tell: Callable[[], tuple[int, Any]] | None = None

    @property
    def keeps_rank(self) -> bool:
        """Whether the loop continues only with the same rank of as many: a script's own sampler is
        cut for the ranks that there were when it was made."""
        return self.yields_again and not self.divides_steps


class SessionHost(Protocol):
    """The services of the process for a function that outlives its generations."""

    def end_group(self, channel: GenerationChannel, reason: str) -> None:
        """Ends the waits for peers of a generation. By any thread."""

    def await_begin(self) -> Membership:
        """Returns the generation ahead of which the function was called, once it begins. By the
        training thread."""

    def await_next(self, *, drained: bool, keeps_rank: bool) -> Membership:
        """Leaves the generation, and returns the next one; `keeps_rank`: if this worker has the
        same rank of as many there. By the training thread."""

"""One generation's line between a worker's training thread and its command threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rayzero.workers.connections import Connections
from rayzero.workers.heartbeat import Progress
from rayzero.workers.interrupt import Interrupt
from rayzero.workers.messages import Message


@dataclass(frozen=True)
class Wire:
    """Messages, the progress record, and the ways out.

    Attributes:
        interrupt: out of the function at its next report, phase or step.
        drain: out of it at the end of a step that all ranks agree on, with the state mirrored.
        connections: the generation's, to be cut where a wait in them must end.
    """

    post: Callable[[Message], None]
    generation: int = 0
    progress: Progress = field(default_factory=Progress)
    interrupt: Interrupt = field(default_factory=Interrupt)
    drain: Interrupt = field(default_factory=Interrupt)
    connections: Connections = field(default_factory=Connections)

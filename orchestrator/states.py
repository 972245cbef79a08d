"""The states of a job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    PENDING = "pending"
    """Accepted; nothing was asked of the cluster yet."""
    STARTING = "starting"
    """Waiting for resources, for the workers' processes, and for their first process group."""
    RUNNING = "running"
    """Every member of the generation is in the user's function."""
    RESIZING = "resizing"
    """Between two generations because the world size changes, by wish."""
    RECOVERING = "recovering"
    """Between two generations because a worker was lost."""
    STOPPING = "stopping"
    """The user's functions are being unwound, by wish."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_final(self) -> bool:
        return self in FINAL


FINAL = frozenset({State.SUCCEEDED, State.FAILED, State.STOPPED})


@dataclass(frozen=True)
class JobState:
    """Where a job stands.

    Args:
        generation: the number of its newest process group; 0: none yet.
        passage: how often it set out for a new generation. A fault on the way sets out again, and
            what the way before still brings is stale.
    """

    state: State = State.PENDING
    generation: int = 0
    passage: int = 0

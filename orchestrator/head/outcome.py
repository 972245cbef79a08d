"""What a job's process tells of the job: how it stands, what is new, how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.notices import Notice
from rayzero.orchestrator.result import JobResult
from rayzero.orchestrator.states import State


@dataclass(frozen=True)
class Ended:
    """How a job ended: with a result, or with an error."""

    result: JobResult | None = None
    error: RayzeroError | None = None

    def outcome(self) -> JobResult:
        """
        Raises:
            JobFailedError, ConfigError: the job failed, and why.
            JobStoppedError: it was stopped.
        """
        if self.result is None:
            raise self.error or JobFailedError("the controller ended without a result")
        return self.result


@dataclass(frozen=True)
class News:
    """What happened since somebody asked last.

    Args:
        run: which process tells it; another one counts its notices anew.
        notices: in order.
        upto: the number of the last of them; to be given with the next question.
        missed: how many were dropped because they were not fetched in time.
        ended: the end, once there is nothing more to come.
    """

    run: str
    notices: tuple[Notice, ...]
    upto: int
    missed: int = 0
    ended: Ended | None = None


@dataclass(frozen=True)
class JobStatus:
    """How a job stands.

    Args:
        state: a `State`; None when its process is gone and no end was recorded.
        step: finished steps.
        steps: that were asked for; None when nobody knows.
        workers_min, workers_max: the limits as they are now.
        began_at_s, at_s: when it was submitted, and of when this is, as Unix time.
        faults: by cause.
        checkpoint_step: of the newest checkpoint.
        journal: the folder of its journal, a path or a URL.
        log: the file of all that it printed, on the cluster's head.
        error: why it failed; the first line.
    """

    name: str
    state: State | None
    step: int = 0
    steps: int | None = None
    generation: int = 0
    world_size: int = 0
    workers_min: int = 0
    workers_max: int = 0
    loss: float | None = None
    began_at_s: float = 0.0
    at_s: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    repairs: int = 0
    checkpoint_step: int | None = None
    journal: str = ""
    log: str = ""
    error: str = ""

    @property
    def is_running(self) -> bool:
        return self.state is not None and not self.state.is_final

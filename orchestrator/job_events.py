"""The job's event stream: everything that happens to a job, as typed events.

The controller emits each event once. Observers subscribe to the types that they want: the event
buffer that clients read, the log, the journal, the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, get_args

from rayzero.orchestrator.machine import State
from rayzero.orchestrator.policies.failure import Fault
from rayzero.orchestrator.progress import StepRecord
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.messages import LogLine, RoleReport, WorkerInfo
from rayzero.workers.rollouts.counts import RolloutCounts
from rayzero.workers.step_rows import Heartbeats, StepRows


@dataclass(frozen=True)
class RunBegun:
    """A process begins a run of the job, or continues one (`adopted`).

    Args:
        run: the id of the process.
        spec: the job's spec, without secrets.
        working_dir: the submitter's working directory.
        by_value: the training function was submitted as an object, not by name.
        source: a hash of the job's code; empty if unknown.
    """

    run: str
    spec: dict[str, Any]
    working_dir: str
    by_value: bool
    adopted: bool = False
    source: str = ""


@dataclass(frozen=True)
class RunEnded:
    """The run has ended; `error` is empty if it succeeded."""

    state: str
    error: str = ""


@dataclass(frozen=True)
class FolderRemoved:
    """The job's folder was removed, with its checkpoints, and made again."""


@dataclass(frozen=True)
class StateEntered:
    """The job's state machine changed its state, after `step` finished steps. `trigger` is the
    class name of the machine's event that caused it."""

    state: State
    generation: int
    world_size: int
    step: int = 0
    trigger: str = ""


@dataclass(frozen=True)
class MetricsServed:
    """The job serves its metrics at `url`/metrics and `url`/snapshot.json."""

    url: str


@dataclass(frozen=True)
class WorkersReady:
    """The processes of these workers are running and ready. `start_s` is how long the job's first
    workers took; 0 for later workers."""

    workers: tuple[WorkerInfo, ...]
    start_s: float = 0.0


@dataclass(frozen=True)
class ResourcesAwaited:
    """The job's first workers wait for resources: `text` says for what and who holds it, and is
    empty once they have them. The job fails after `limit_s` (`workers.start_timeout_s`)."""

    text: str
    limit_s: float


@dataclass(frozen=True)
class JobWarning:
    text: str


@dataclass(frozen=True)
class Resumed:
    """The job continues from a checkpoint of an earlier run."""

    step: int
    folder: str


@dataclass(frozen=True)
class RunAdopted:
    """The job continues a run whose controller was lost, after `step` finished steps. Steps after
    the newest checkpoint are recomputed. `offline_s` counts from the last entry of the journal."""

    step: int
    generation: int
    offline_s: float


@dataclass(frozen=True)
class Reattached:
    """The job's new process continues with the workers of the lost one, which have trained on: all
    ranks have finished `step` steps of that generation.

    Args:
        offline_s: time since the last entry of the journal.
        lost_ranks: ranks without a worker, which are repaired now.
        roles: the number of surviving workers, by role.
    """

    step: int
    generation: int
    world_size: int
    offline_s: float
    lost_ranks: tuple[int, ...] = ()
    roles: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FaultDetected:
    """A fault, as it is first seen. `rank` is None if the worker was no member of the generation;
    `text` is the full description. If `is_fatal`, the job's error has the same description."""

    cause: str
    worker: WorkerInfo
    rank: int | None
    step: int
    text: str
    is_fatal: bool = False


@dataclass(frozen=True)
class NodeChecked:
    """A node failed its health check, or passes it again. The workers of a failed node are used
    only if there are no others. `text` has each failed figure, its limit and a fix; it is empty if
    the node passes."""

    node_id: str
    node: str
    text: str


@dataclass(frozen=True)
class Repaired:
    """The first finished step after a recovery.

    Args:
        cause: of the first fault, if several faults were recovered from together.
        lost: the lost members, as "rank 1 on node a (pid 7)".
        step: the step that training went back to.
        steps_redone: finished steps that had to be recomputed.
        world_size_before, world_size: ranks before and after.
        seconds: duration of each recovery phase; `recompute` ends with the next finished step,
            whose duration is not included.
    """

    cause: str
    lost: tuple[str, ...]
    step: int
    steps_redone: int
    world_size_before: int
    world_size: int
    seconds: dict[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Resized:
    """The first finished step after a requested change of members. `seconds` as in `Repaired`."""

    reason: str
    step: int
    world_size_before: int
    world_size: int
    seconds: dict[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Checkpointed:
    """A checkpoint was committed. `seconds`: from the pinned step to the manifest, in the
    background of training; `stopped_s`: how long training paused for it, on the slowest rank."""

    step: int
    folder: str
    nbytes: int
    seconds: float
    stopped_s: float


@dataclass(frozen=True)
class CheckpointFailed:
    """A checkpoint could not be written. Training continues. `again_in_s` is the delay of the next
    try; None after the last one."""

    step: int
    text: str
    tries: int
    again_in_s: float | None


@dataclass(frozen=True)
class CheckpointsPruned:
    """The checkpoints of these steps were removed, by `checkpoint.keep`."""

    steps: tuple[int, ...]


@dataclass(frozen=True)
class FaultRecorded:
    """A fault was classified, and counts against the fault budget. A fatal one ends the job."""

    fault: Fault
    is_fatal: bool = False


@dataclass(frozen=True)
class Rewound:
    """Training goes back to a step; `steps_redone` finished steps have to be recomputed."""

    step: int
    steps_redone: int


@dataclass(frozen=True)
class LimitsChanged:
    """The job may have this many workers from now on."""

    min_workers: int
    max_workers: int


@dataclass(frozen=True)
class RoleWorkerReady:
    """The function of a role's worker has begun. `number` is the worker's number in the role;
    `workers` is how many workers of the role run now."""

    role: str
    number: int
    worker: WorkerInfo
    workers: int


@dataclass(frozen=True)
class RoleWorkerEnded:
    """A role's worker has ended: its function has returned, or the worker was not needed. `workers`
    is how many workers of the role run now."""

    role: str
    number: int
    workers: int
    has_returned: bool = False


@dataclass(frozen=True)
class RoleFault:
    """A role lost a worker, or a worker's function failed. The worker is started again, unless the
    fault is fatal: then the job fails. `text` is the full description. `workers` is how many
    workers of the role run now; a worker that had not begun did not count. `window_s` is the length
    of the role's fault window."""

    role: str
    number: int
    cause: str
    worker: WorkerInfo
    text: str
    workers: int
    is_fatal: bool = False
    window_s: float = 0.0


@dataclass(frozen=True)
class RoleLimitsChanged:
    """A role may have this many workers from now on."""

    role: str
    min_workers: int
    max_workers: int


@dataclass(frozen=True)
class RolloutsCounted:
    """The counts of the rollout buffer, which the controller polls; `stages` has the role of each
    stage."""

    counts: RolloutCounts
    stages: tuple[str, ...]


@dataclass(frozen=True)
class StepReplicated:
    """Other nodes hold replicas of a step; `nbytes` were copied for it."""

    step: int
    nbytes: int


@dataclass(frozen=True)
class GenerationStarted:
    """The members of a generation get their assignments; `nodes` has the node of each rank."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class NumbersReserved:
    """Generation numbers up to `last` are reserved, and may be used once this event is in the
    journal."""

    last: int


ClientEvent: TypeAlias = (
    StateEntered
    | MetricsServed
    | WorkersReady
    | ResourcesAwaited
    | JobWarning
    | Resumed
    | RunAdopted
    | Reattached
    | FaultDetected
    | NodeChecked
    | FaultFired
    | RoleWorkerReady
    | RoleWorkerEnded
    | RoleFault
    | Repaired
    | Resized
    | Checkpointed
    | CheckpointFailed
    | StepRecord
    | LogLine
)
"""Events that clients see: consoles, `JobHandle.events`."""


ControlEvent: TypeAlias = (
    RunBegun
    | RunEnded
    | FolderRemoved
    | FaultRecorded
    | Rewound
    | LimitsChanged
    | RoleLimitsChanged
    | StepReplicated
    | GenerationStarted
    | CheckpointsPruned
    | NumbersReserved
)
"""Events that only the job's own process uses."""


FrequentEvent: TypeAlias = StepRows | Heartbeats | RoleReport | RolloutsCounted
"""Messages of the newest generation's ranks, of roles' workers and of the rollout buffer. Only the
metrics observe them, because there are too many. The last report of a step precedes its
`StepRecord`."""


JobEvent: TypeAlias = ClientEvent | ControlEvent

CLIENT_EVENTS: tuple[type[JobEvent], ...] = get_args(ClientEvent)
JOB_EVENTS: tuple[type[JobEvent], ...] = CLIENT_EVENTS + get_args(ControlEvent)


class JobObserver(Protocol):
    def on_event(self, event: JobEvent) -> None:
        """Called in the emitter's thread, in order. Must not block."""


class NullObserver:
    def on_event(self, event: JobEvent) -> None:
        del event

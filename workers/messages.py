"""Messages between the controller and a worker. Frozen, small, and free of torch.

The controller sends `WorkerSpec` once and `GenerationSpec` with a `RankAssignment` for each
generation; the worker's messages are returned by `poll`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.vault.records import Restore

CrashKind: TypeAlias = Literal["config", "entrypoint", "data", "state", "collective", "user"]


@dataclass(frozen=True)
class MirrorPolicy:
    """When a worker copies its state into its node's vault.

    Args:
        replicas: copies of each shard outside its process; 0: only for checkpoints and resizes.
        every_steps: steps between two mirrors; None: chosen from the measured cost.
        checkpoint_every_steps: steps between two checkpoints; None: no checkpoints.
    """

    replicas: int = 0
    every_steps: int | None = None
    checkpoint_every_steps: int | None = None


@dataclass(frozen=True)
class WorkerSpec:
    """The settings of a worker, constant over all its generations.

    Args:
        entrypoint: `module:function`, or a callable pickled by value.
        steps: optimizer steps of the job; None: the training function decides.
        engine_config: the parsed engine config.
        hang_timeout_s: a rank without progress for this long counts as hung.
        mirror: when to mirror the state into the vault, and when to make a checkpoint.
        faults: faults to inject, in the language of `rayzero.workers.chaos.spec`.
        ledger: record consumed sample ids under `output_dir`/ledger/`run`.
        run: id of this run of the job; ids of later runs sort after it.
        working_dir: the submitter's working directory; used on the worker if it exists there.
        import_paths: the submitter's `sys.path`; the first entry goes to the front.
    """

    name: str
    entrypoint: str | bytes
    args: dict[str, Any]
    seed: int
    steps: int | None
    output_dir: str
    engine_config: dict[str, Any] | None
    cpus: float
    gpus: float
    hang_timeout_s: float
    working_dir: str
    import_paths: tuple[str, ...]
    mirror: MirrorPolicy
    faults: tuple[str, ...] = ()
    ledger: bool = False
    run: str = ""


@dataclass(frozen=True)
class WorkerInfo:
    """Where a worker runs. `index` is its position in the worker group and never changes."""

    index: int
    node_id: str
    node: str
    ip: str
    pid: int


@dataclass(frozen=True)
class Assignment:
    """A worker's rank in one generation, and the store where its members rendezvous.

    Args:
        vault: the address of the vault on the worker's node; empty if there is none.
        restore: the state to start from; None: a fresh start.
        shares: each rank's share of a step's samples, adding up to 1; empty: even shares.
        remote: pin steps as often as possible, for replication to another node's vault.
        faults: all faults injected since the job started, in addition to `WorkerSpec.faults`.
    """

    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store_host: str
    store_port: int
    vault: str = ""
    restore: Restore | None = None
    shares: tuple[float, ...] = ()
    remote: bool = False
    faults: tuple[str, ...] = ()


class RankAssignment(NamedTuple):
    """The part of an `Assignment` that differs between workers."""

    rank: int
    local_rank: int
    local_world_size: int
    vault: str = ""


@dataclass(frozen=True)
class GenerationSpec:
    """The part of an `Assignment` that all workers share. Its size grows with the number of ranks,
    so it is pickled once, not once per worker."""

    generation: int
    world_size: int
    store_host: str
    store_port: int
    restore: Restore | None = None
    shares: tuple[float, ...] = ()
    remote: bool = False
    faults: tuple[str, ...] = ()

    def assignment_for(self, member: RankAssignment) -> Assignment:
        return Assignment(**vars(self), **member._asdict())


@dataclass(frozen=True)
class Joined:
    """This rank has joined the process group of its generation."""

    generation: int
    rank: int


@dataclass(frozen=True)
class Restored:
    """The engine of this generation has loaded its initial state.

    Args:
        step: finished steps of that state; 0 for a fresh start.
        seconds: duration of each part on this rank: `load`.
    """

    generation: int
    rank: int
    step: int
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepReport:
    """A rank finished a step.

    Args:
        counters: summed over micro-steps, and by the controller over ranks: `tokens`.
        gauges: this rank's values: `loss`, `step_s`, `bytes/<class>`...
        at_s: Unix time of the step's end on the rank's node.
    """

    generation: int
    rank: int
    step: int
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    at_s: float = 0.0


@dataclass(frozen=True)
class Heartbeat:
    """The progress of the training thread.

    Args:
        silent_s: seconds since the thread last reported progress.
        collective: the number of the collective last entered in this generation.
        waiting: whether it waits for other ranks in that collective.
    """

    rank: int
    step: int
    phase: str
    silent_s: float
    collective: int = 0
    waiting: bool = False


@dataclass(frozen=True)
class LogLine:
    """One line of the worker's output; `stream` is stdout or stderr."""

    rank: int
    stream: str
    text: str


@dataclass(frozen=True)
class Finished:
    """The training function returned.

    Args:
        result: its return value, if that was a mapping that can be encoded as JSON.
        counters: counted after the last finished step.
        peak_rss_bytes: the process's peak resident memory.
    """

    generation: int
    rank: int
    result: dict[str, Any] | None
    counters: dict[str, float]
    peak_rss_bytes: int


@dataclass(frozen=True)
class InProcessStateInfo:
    """The training state left in a worker's memory after its training function was unwound.

    Args:
        step: finished steps of the state.
        whole: whether it is the complete state, not this rank's shard only.
    """

    step: int
    whole: bool


@dataclass(frozen=True)
class Stopped:
    """The training function was unwound on the controller's request.

    Args:
        memory: the state left in memory; None if there was no engine, or it was mid-update.
    """

    generation: int
    rank: int
    memory: InProcessStateInfo | None = None


@dataclass(frozen=True)
class Crashed:
    """The training function raised an exception, or could not be called.

    Args:
        kind: the error's cause; "collective" means that a peer failed.
        step: the current step, counted from 1; 0 before the function was called.
        error: the exception as text, without a traceback.
        traceback: the user's frames; empty if the error message is sufficient.
        memory: as in `Stopped`.
    """

    generation: int
    rank: int
    kind: CrashKind
    step: int
    error: str
    traceback: str
    memory: InProcessStateInfo | None = None


@dataclass(frozen=True)
class Pinned:
    """This rank's state of a step is in its vault, pinned.

    Args:
        checkpoint: pinned for a checkpoint; otherwise for replication to other nodes.
        stopped_s: how long training was paused for the copy.
    """

    generation: int
    rank: int
    step: int
    checkpoint: bool
    stopped_s: float


WorkerMessage: TypeAlias = (
    Joined
    | Restored
    | StepReport
    | Heartbeat
    | LogLine
    | Finished
    | Stopped
    | Crashed
    | Pinned
    | FaultFired
)

"""What crosses the wire between the controller and a worker. Frozen, small, and free of torch.

Down go `WorkerSpec` (once) and `Assignment` (once a generation); messages go up through `poll`. What a vault
says of itself is in `rayzero.workers.vault.records`, and can be had from here too.
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
        every_steps: steps between two mirrors; None: chosen by what one costs.
        checkpoint_every_steps: steps between two checkpoints; None: never.
    """

    replicas: int = 0
    every_steps: int | None = None
    checkpoint_every_steps: int | None = None


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is told once, at its start, and keeps through all generations.

    Args:
        entrypoint: `module:function`, or a callable pickled by value.
        steps: optimizer steps the job asks for; None: the user's function decides.
        engine_config: the engine config, already read from its file.
        hang_timeout_s: a rank that makes no progress for so long is taken for hung.
        mirror: when the state is mirrored into the vault, and when a checkpoint is due.
        faults: faults to inject, in the language of `rayzero.workers.chaos.spec`.
        ledger: whether consumed sample ids are written down, under `output_dir`/ledger/`run`.
        run: which run of the job this is; later ones sort behind.
        working_dir: the submitter's working directory: the worker's too, where it exists.
        import_paths: what the submitter could import from; the first goes before everything.
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
    """Where a worker lives. `index` is its place in the worker group and never changes."""

    index: int
    node_id: str
    node: str
    ip: str
    pid: int


@dataclass(frozen=True)
class Assignment:
    """A worker's place in one generation, and the store where its members meet.

    Args:
        vault: the address of the vault on the worker's node; empty when there is none.
        restore: what to begin from; None for a fresh start.
        shares: each rank's share of a step's samples, adding up to 1; empty for even shares.
        remote: whether steps are pinned as often as can be, for another node's vault to copy.
        faults: injected since the job began, all of them, beside those of `WorkerSpec`.
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
    """What a worker's place in a generation has of its own; see `Assignment`."""

    rank: int
    local_rank: int
    local_world_size: int
    vault: str = ""


@dataclass(frozen=True)
class GenerationSpec:
    """What all places of a generation have in common; see `Assignment`. It grows with the number of
    ranks, so it is packed once, not once a worker."""

    generation: int
    world_size: int
    store_host: str
    store_port: int
    restore: Restore | None = None
    shares: tuple[float, ...] = ()
    remote: bool = False
    faults: tuple[str, ...] = ()

    def assignment_for(self, own: RankAssignment) -> Assignment:
        """One worker's place."""
        return Assignment(**vars(self), **own._asdict())


@dataclass(frozen=True)
class Joined:
    """The process group of this generation stands, as seen by this rank."""

    generation: int
    rank: int


@dataclass(frozen=True)
class Restored:
    """The engine of this generation has the state it begins from.

    Args:
        step: finished steps in it; 0 for a fresh start.
        seconds: how long each part took on this rank: `join`, `build`, `load`.
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
        at_s: when, as Unix time on the rank's node.
    """

    generation: int
    rank: int
    step: int
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    at_s: float = 0.0


@dataclass(frozen=True)
class Heartbeat:
    """How far the training thread is, and how long ago it last said so.

    Args:
        collective: the number of the collective last entered in this generation.
        waiting: whether it is waiting for other ranks in there.
    """

    rank: int
    step: int
    phase: str
    silent_s: float
    collective: int = 0
    waiting: bool = False


@dataclass(frozen=True)
class LogLine:
    """One line the worker's process printed; `stream` is stdout or stderr."""

    rank: int
    stream: str
    text: str


@dataclass(frozen=True)
class Finished:
    """The user's function returned.

    Args:
        result: what it returned, if that was a mapping that JSON can hold.
        counters: counted after the last finished step.
        peak_rss_bytes: the most memory this process ever held.
    """

    generation: int
    rank: int
    result: dict[str, Any] | None
    counters: dict[str, float]
    peak_rss_bytes: int


@dataclass(frozen=True)
class InProcessStateInfo:
    """The state that a worker's own memory holds after its function was unwound.

    Args:
        step: finished steps in it.
        whole: whether it is all of the state, not this rank's part only.
    """

    step: int
    whole: bool


@dataclass(frozen=True)
class Stopped:
    """The user's function was unwound because the controller asked for it.

    Args:
        memory: None when there was no engine, or it was in the middle of an update.
    """

    generation: int
    rank: int
    memory: InProcessStateInfo | None = None


@dataclass(frozen=True)
class Crashed:
    """An exception left the user's function, or kept it from being called.

    Args:
        kind: what the exception says about its cause; "collective" means that a peer is at fault.
        step: the step that was being worked on, counted from 1; 0 before the function was called.
        error: the exception as one text, without a traceback.
        traceback: the user's frames; empty where the error itself says all there is to say.
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
    """This rank's state of a step is in its vault, and stays there until it is unpinned.

    Args:
        checkpoint: whether a checkpoint is to be made of it; otherwise it is for other nodes.
        stopped_s: how long training stood still for it.
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

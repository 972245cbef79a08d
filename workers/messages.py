"""The records that controller and worker send each other. Frozen, small, and free of torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from rayzero.workers.chaos.spec import FaultFired, FaultSpec
from rayzero.workers.rollouts.address import BufferAddress
from rayzero.workers.spread import Spread
from rayzero.workers.vault.records import Restore

CrashKind: TypeAlias = Literal[
    "config", "entrypoint", "data", "state", "device", "collective", "user"
]

SCRIPT_ENTRYPOINT = "rayzero.workers.launch.script:run_script"
"""The training function of a job with `launch:`."""


@dataclass(frozen=True)
class MirrorPolicy:
    """The times at which a worker copies its state into its node's vault.

    Args:
        replicas: copies of each shard outside its process; 0: only for checkpoints and resizes.
        every_steps: steps between two mirrors; None: chosen from the measured cost.
        checkpoint_every_steps: steps between two checkpoints; None: no checkpoints.
        version_every_steps: most steps between two versions of the weights, which roles read from
            mirrors; the first is the state that a job begins with. None: no role reads weights.
    """

    replicas: int = 0
    every_steps: int | None = None
    checkpoint_every_steps: int | None = None
    version_every_steps: int | None = None


@dataclass(frozen=True)
class WorkerSpec:
    """The settings of a worker, constant over all its generations.

    Args:
        entrypoint: `module:function`, or a callable pickled by value.
        steps: optimizer steps of the job; None: the training function decides.
        engine_config: the parsed engine config.
        patience_s: `recovery.patience_s`; for a role's worker, its `recovery.hang_timeout_s`.
        mirror: when to mirror the state into the vault, and when to make a checkpoint.
        ledger: whether to record consumed sample ids under `output_dir`/ledger/`run`.
        run: id of this run of the job; ids of later runs sort after it.
        working_dir: the submitter's; the worker imports from it, and works in it if it exists.
        import_paths: the submitter's `sys.path`, added to the worker's.
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
    patience_s: float
    working_dir: str
    import_paths: tuple[str, ...]
    mirror: MirrorPolicy
    faults: tuple[FaultSpec, ...] = ()
    ledger: bool = False
    run: str = ""


@dataclass(frozen=True)
class RoleWorkerSpec(WorkerSpec):
    """The settings of a role's worker: those of the job, with the role's function, resources and
    `patience_s`.

    Args:
        stage: the role's place in the chain of roles that make rollouts, from 0; None: no place.
        group: samples of each prompt.
        start_timeout_s: the job's `workers.start_timeout_s`: limit of the wait for first weights.
    """

    role: str = ""
    stage: int | None = None
    group: int = 1
    start_timeout_s: float = 600.0


@dataclass(frozen=True)
class WorkerInfo:
    """The node and the process of a worker. `index` is its position in the worker group and never
    changes; `cores` is how many cores of the node the worker may use, 0 if unknown."""

    index: int
    node_id: str
    node: str
    ip: str
    pid: int
    cores: int = 0


@dataclass(frozen=True)
class GenerationSpec:
    """The part of an `Assignment` that all workers of a generation share. Its size grows with the
    number of ranks, so it is pickled once, not once per worker.

    Args:
        store_host, store_port: the store where the members rendezvous.
        restore: the state to start from; None: a fresh start.
        members: by rank, for a controller that has not formed this generation.
        shares: each rank's share of a step's samples, adding up to 1; empty: even shares.
        faults: all faults injected since the job started, in addition to `WorkerSpec.faults`.
        survivors_stay: some members' training functions continue in their loops, where new
            members meet them; otherwise all members call theirs.
        notes: content of the `Notes` for functions that are called again.
        parts: number of equal parts of a step (`StepDivided`); 0: unknown.
        is_ahead: the generation has not begun, and has neither a store nor a state. The function
            is called, and waits for the generation where it needs the state or other ranks.
        rollout_group: samples of each prompt; 0: the job has no rollouts.
        rollouts: the rollout buffer that the ranks read from; None: there is none, or none yet.
        secret: authenticates clients of the store.
    """

    generation: int
    world_size: int
    store_host: str
    store_port: int
    restore: Restore | None = None
    members: tuple[WorkerInfo, ...] = ()
    shares: tuple[float, ...] = ()
    faults: tuple[FaultSpec, ...] = ()
    survivors_stay: bool = False
    notes: bytes = b""
    parts: int = 0
    is_ahead: bool = False
    rollout_group: int = 0
    rollouts: BufferAddress | None = None
    secret: bytes = field(default_factory=lambda: os.urandom(32), repr=False)


@dataclass(frozen=True)
class RankAssignment:
    """The part of an `Assignment` for one worker.

    Args:
        vault: the address of the node's vault; empty without one.
        replica_nodes: nodes whose vaults copy this rank's state, as often as possible.
    """

    rank: int
    local_rank: int
    local_world_size: int
    vault: str
    replica_nodes: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Assignment(GenerationSpec, RankAssignment):
    """A worker's rank in a generation, with what all its members have in common."""


@dataclass(frozen=True)
class RankMessage:
    generation: int
    rank: int


@dataclass(frozen=True)
class Joined(RankMessage):
    """This rank has joined the process group of its generation."""


@dataclass(frozen=True)
class Prepared(RankMessage):
    """The training function was called ahead of its generation, needs the state or the other ranks
    now, and waits for the generation."""


@dataclass(frozen=True)
class Restored(RankMessage):
    """The engine of this generation has loaded its initial state, of `step` finished steps."""

    step: int


@dataclass(frozen=True)
class WentBack(RankMessage):
    """Before its first step, the training function has loaded a checkpoint of its own, of `step`
    finished steps, which is older than the state restored. Sent by rank 0, for all."""

    step: int


@dataclass(frozen=True)
class StepDivided(RankMessage):
    """The training function cuts a step into this many equal parts over all ranks, as Trainer and
    Accelerate do: only numbers of ranks that divide it can continue."""

    parts: int


@dataclass(frozen=True)
class Divided(RankMessage):
    """The ranks have begun to divide the samples of steps by these shares. Sent by rank 0."""

    shares: tuple[float, ...]


@dataclass(frozen=True)
class StepReport(RankMessage):
    """A rank finished a step.

    Args:
        counters: summed over micro-steps, and by the controller over ranks: `tokens`,
            `streams/<source>/samples`...
        gauges: this rank's values: `loss`, `step_s`, `bytes/<class>`...
        at_s: Unix time of the step's end on the rank's node.
    """

    step: int
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    at_s: float = 0.0


class Heartbeat(NamedTuple):
    """The progress of the training thread.

    Args:
        silent_s: seconds since the thread last reported progress.
        collective: number of the collective last entered in this generation.
        waiting: whether the thread waits in that collective.
    """

    rank: int
    step: int
    phase: str
    silent_s: float
    collective: int = 0
    waiting: bool = False


@dataclass(frozen=True)
class RoleReport:
    """The report of a role's worker, on the time since its previous report.

    Args:
        role, number: of the worker.
        values: the reported values under each name passed to `RoleContext.report`.
        tokens: the sum of the reported tokens.
        version: finished steps of the worker's weights; None: it has not read any.
        weights_wait_s: how long the worker waited for weights.
    """

    role: str
    number: int
    values: dict[str, Spread] = field(default_factory=dict)
    tokens: float = 0.0
    version: int | None = None
    weights_wait_s: float = 0.0


@dataclass(frozen=True)
class LogLine:
    """One line of a worker's output; `stream` is stdout or stderr. With a `role`, `rank` is the
    worker's number in it."""

    rank: int
    stream: str
    text: str
    role: str = ""

    @property
    def speaker(self) -> str:
        """`rank 0`, or `rollout 0` for a role's worker."""
        return f"{self.role or 'rank'} {self.rank}"


@dataclass(frozen=True, kw_only=True)
class Left(RankMessage):
    """The worker has left the generation.

    Args:
        memory: None if there is no engine, or it is mid-update.
        stays: the training function waits in its loop for the next generation.
        keeps_rank: it continues only with the same rank and number of ranks; else it is called
            again.
        notes: for functions that are called in the next generation.
    """

    memory: InProcessStateInfo | None = None
    stays: bool = False
    keeps_rank: bool = False
    notes: Notes | None = None


@dataclass(frozen=True)
class Finished(Left):
    """The training function returned.

    Args:
        result: its return value, if that was a mapping that can be encoded as JSON.
        counters: counted after the last finished step.
        peak_rss_bytes: the process's peak resident memory.
    """

    result: dict[str, Any] | None
    counters: dict[str, float]
    peak_rss_bytes: int


@dataclass(frozen=True)
class InProcessStateInfo:
    """The state that a training function left in a worker's memory.

    Args:
        step: finished steps of the engines' state; None: the state is not that of one step.
        whole: the engines have the whole state, not only the rank's shard.
        generation, world_size: those that the shard was cut for: of an earlier generation, if the
            last one ended before its state was loaded.
        copies: steps of which the mirror has complete copies of the shard, in memory that
            outlives the vault.
    """

    step: int | None
    whole: bool
    generation: int
    world_size: int
    copies: tuple[int, ...] = ()

    @property
    def steps(self) -> set[int]:
        """The steps whose shard can be copied from this memory."""
        return {*self.copies} if self.step is None else {self.step, *self.copies}


@dataclass(frozen=True)
class Notes:
    """Records what a function has done after `step` finished steps, for functions called in
    the next generation: `EpochReplay.notes`, or what Trainer's adapter has pickled."""

    step: int
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Stopped(Left):
    """The worker has left the generation on the controller's request."""


@dataclass(frozen=True)
class Crashed(Left):
    """The training function raised an exception, or could not be called.

    Args:
        kind: the error's cause; "collective" means that a peer failed, "device" that this process
            cannot use its device any more, and ends.
        step: the current step, counted from 1; 0 before the function was called.
        error: the exception as text, without a traceback.
        traceback: the user's frames; empty if the error message is sufficient.
    """

    kind: CrashKind
    step: int
    error: str
    traceback: str


@dataclass(frozen=True)
class Pinned(RankMessage):
    """This rank's state of a step is in its vault, pinned for a checkpoint.

    Args:
        stopped_s: how long training was paused for the copy.
        nbytes: the size of the copy.
    """

    step: int
    stopped_s: float
    nbytes: int = 0


@dataclass(frozen=True)
class Mirrored(RankMessage):
    """This rank's state of the step with which the job or the generation begins is in its vault,
    where roles read weights. For later steps the step reports say so."""

    step: int


WorkerMessage: TypeAlias = RankMessage | Heartbeat | RoleReport | LogLine | FaultFired

"""What crosses the wire between the controller and a worker. Frozen, small, and free of torch.

Down go `Setup` (once) and `Assign` (once a generation); everything else goes up through `poll`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

CrashKind: TypeAlias = Literal["config", "entrypoint", "data", "collective", "user"]


@dataclass(frozen=True)
class Setup:
    """What a worker is told once, at its start, and keeps through all generations.

    Args:
        entrypoint: `module:function`, or a callable pickled by value.
        steps: optimizer steps the job asks for; None: the user's function decides.
        engine_config: the engine config, already read from its file.
        hang_timeout_s: the collective timeout.
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


@dataclass(frozen=True)
class WorkerInfo:
    """Where a worker lives. `index` is its place in the worker group and never changes."""

    index: int
    node_id: str
    node: str
    ip: str
    pid: int


@dataclass(frozen=True)
class Assign:
    """A worker's place in one generation, and the store where its members meet."""

    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store_host: str
    store_port: int


@dataclass(frozen=True)
class Joined:
    """The process group of this generation stands, as seen by this rank."""

    generation: int
    rank: int


@dataclass(frozen=True)
class Report:
    """A rank finished a step.

    Args:
        counters: summed over micro-steps, and by the controller over ranks: `tokens`.
        gauges: this rank's values: `loss`, `step_s`, `bytes/<class>`...
    """

    generation: int
    rank: int
    step: int
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Heartbeat:
    """How far the training thread is, and how long ago it last said so."""

    rank: int
    step: int
    phase: str
    silent_s: float


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
class Stopped:
    """The user's function was unwound because the controller asked for it."""

    generation: int
    rank: int


@dataclass(frozen=True)
class Crashed:
    """An exception left the user's function, or kept it from being called.

    Args:
        kind: what the exception says about its cause; "collective" means that a peer is at fault.
        step: the step that was being worked on, counted from 1; 0 before the function was called.
        error: the exception as one text, without a traceback.
        traceback: the user's frames; empty where the error itself says all there is to say.
    """

    generation: int
    rank: int
    kind: CrashKind
    step: int
    error: str
    traceback: str


Message: TypeAlias = Joined | Report | Heartbeat | LogLine | Finished | Stopped | Crashed

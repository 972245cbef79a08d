"""How long a rank may make no progress in a phase: learned from its own steps, or set."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import gt
from types import MappingProxyType

from rayzero.engine.data.consumed import OUTSIDE_PHASE, SAMPLES_PHASE
from rayzero.workers.messages import Heartbeat
from rayzero.workers.step_rows import StepRows

LEAST_LIMIT_S = 7.0
"""The least of the learned limits: a hang is to be repaired within 10 s where steps are short."""
STEP_FACTOR = 5
SILENCE_FACTOR, OUTSIDE_FACTOR = 2, 10
"""Limit of the silence in a phase, as a multiple of its longest silence; the silence outside steps
varies more."""
FIRST_STEP_FACTOR = 4
"""Limit of the first step of a process or a generation, as a multiple of the longest one so far:
the node's caches may be cold, or the node slower."""
COMPILED_FACTOR = 60
"""Limit of the first step of a generation, in usual steps: it may compile again."""
RECENT_STEPS = 200
_BLOCK_STEPS, _BLOCKS = 100, 10
_STARTUP_PHASES = frozenset({"start", "join", "load"})
INPUT_PHASES = frozenset({"data", SAMPLES_PHASE, OUTSIDE_PHASE})
"""Phases in which a store, or the script, may be slow, not the rank."""
_GAUGES = {
    "data": "phases/data",
    "forward": "phases/forward",
    "backward": "phases/backward",
    "reduce": "phases/reduce",
    "update": "phases/update",
    "publish": "phases/publish",
    SAMPLES_PHASE: "phases/data",
    OUTSIDE_PHASE: "phases/other",
}
"""The gauge of a step's seconds in each phase that has a learned limit."""
_POSITIONS = {phase: position for position, phase in enumerate(_GAUGES)}


class StepTimes:
    """The seconds that a rank took for its last steps, without its waits for other ranks.

    The first steps of processes and generations are not included. The longest silences are of the
    last 900 to 1,000 steps. Adding a step takes a microsecond: controllers add thousands a second.
    """

    def __init__(self) -> None:
        self._own_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._longest = deque([[0.0] * len(_GAUGES)], maxlen=_BLOCKS)  # by phase, as `_GAUGES`
        self._count = 0
        self._usual_s: float | None = None  # None: to be computed

    def add(self, own_s: float, phases_s: Sequence[float]) -> None:
        """Adds a step. `phases_s` has the time in each phase, in the order of `_GAUGES`: no less
        than the longest silence in the phase."""
        self._own_s.append(own_s)
        self._usual_s = None
        if self._count % _BLOCK_STEPS == 0 and self._count:
            self._longest.append([0.0] * len(_GAUGES))
        self._count += 1
        longest = self._longest[-1]
        if any(map(gt, phases_s, longest)):
            for position, phase_s in enumerate(phases_s):
                longest[position] = max(longest[position], min(phase_s, own_s))

    @property
    def usual_s(self) -> float:
        """The 95th percentile of the last `RECENT_STEPS`; 0 before the first."""
        if self._usual_s is None:
            ordered = sorted(self._own_s)
            self._usual_s = ordered[int(0.95 * (len(ordered) - 1))] if ordered else 0.0
        return self._usual_s

    def longest_s(self, phase: str) -> float:
        position = _POSITIONS.get(phase)
        return 0.0 if position is None else max(block[position] for block in self._longest)


@dataclass(frozen=True)
class _Alarm:
    """A rank was ended because it was silent for that long in a phase of a step."""

    phase: str
    step: int
    silent_s: float


@dataclass
class StepHistory:
    """The steps of a job's ranks, from which limits are learned."""

    times: defaultdict[int, StepTimes] = field(default_factory=lambda: defaultdict(StepTimes))
    """The steps of each rank, over all generations."""
    reported: set[int] = field(default_factory=set)
    """Workers that have finished a step, in any generation."""
    in_generation: set[int] = field(default_factory=set)
    """Workers that have finished a step in this generation."""
    longest_first_step_s: float = 0.0
    """The longest first step of a new process or a generation, from the loaded state to the
    report."""
    factors: dict[str, float] = field(default_factory=dict)
    """By phase, the factor by which a silence may exceed the learned limit: doubled after each
    false alarm."""
    _first: StepTimes = field(default_factory=StepTimes)
    """The first steps of processes and generations."""
    _alarm: _Alarm | None = None

    def start_generation(self) -> None:
        self.in_generation.clear()

    def add(self, rows: StepRows, trained_s: Callable[[int], float]) -> None:
        """Adds a step of some workers in the present generation.

        Args:
            trained_s: returns how long a worker has trained since it had loaded its state.
        """
        known = self.in_generation
        phases = zip(*map(rows.column, _GAUGES.values()), strict=True)
        for worker, rank, own_s, phases_s in zip(
            rows.workers, rows.ranks, rows.own_s, phases, strict=True
        ):
            if worker in known:
                self.times[rank].add(own_s, phases_s)
                continue
            self._check_alarm(rows.step, phases_s)
            self._first.add(own_s, phases_s)
        if new := [worker for worker in rows.workers if worker not in known]:
            known.update(new)
            self.reported.update(new)
            self.longest_first_step_s = max(self.longest_first_step_s, *map(trained_s, new))

    def add_alarm(self, rank: RankProgress) -> None:
        """Records that a rank is ended because it hangs."""
        beat = rank.heartbeat
        self._alarm = _Alarm(beat.phase, beat.step, rank.silent_s)

    def _check_alarm(self, step: int, phases_s: Sequence[float]) -> None:
        """Looks whether the alarm was false: another rank that repeats the step is as slow in that
        phase, and much slower than first steps before."""
        alarm = self._alarm
        if alarm is None or step < alarm.step:
            return
        took_s = dict(zip(_GAUGES, phases_s, strict=True)).get(alarm.phase, 0.0)
        took_s = 0.0 if took_s < 1.5 * self._first.longest_s(alarm.phase) else took_s
        if step == alarm.step and took_s >= alarm.silent_s:
            self.factors[alarm.phase] = 2 * self.factors.get(alarm.phase, 1.0)
            self._alarm = None
        elif step > alarm.step:
            self._alarm = None


@dataclass(frozen=True)
class RankProgress:
    """The last known progress of a rank that has not finished its function.

    Args:
        heartbeat: the rank's last heartbeat in this generation; `age_s` is its age.
        overdue_s: how late the reply to the current poll is; 0 if it is not late.
        is_new: whether the rank's process has not finished a step yet, in any generation.
        is_first: the same, in this generation.
        state: the state of the process, as in `ProcessStalled`; empty while the process runs.
        is_seen: whether the rank's node answers, and has the process.
        reads: whether the thread of the rank's loader is reading, as in `Stacks`.
    """

    node: str
    pid: int
    heartbeat: Heartbeat
    age_s: float = 0.0
    overdue_s: float = 0.0
    is_new: bool = False
    is_first: bool = False
    state: str = ""
    is_seen: bool = False
    reads: bool = False

    @property
    def rank(self) -> int:
        return self.heartbeat.rank

    def __str__(self) -> str:
        return f"rank {self.rank} on node {self.node} (pid {self.pid})"

    @property
    def activity(self) -> str:
        beat = self.heartbeat
        verb = "waiting in" if beat.waiting else "after"
        return f"phase {beat.phase} of step {beat.step}, {verb} collective {beat.collective}"

    @property
    def is_starting(self) -> bool:
        """Whether a long silence is expected."""
        return self.is_new or self.heartbeat.phase in _STARTUP_PHASES

    @property
    def silent_s(self) -> float:
        return self.heartbeat.silent_s + (self.age_s if self.overdue_s else 0.0)

    @property
    def may_be_silent_s(self) -> float:
        """The longest time that it may have been silent, as far as is known before its next
        heartbeat."""
        return self.heartbeat.silent_s + self.age_s

    @property
    def position(self) -> tuple[int, int]:
        """The rank's step, and the collective that it last entered."""
        return self.heartbeat.step, self.heartbeat.collective


Limit = tuple[float, str]
"""Seconds, and the origin of the limit."""


@dataclass(frozen=True)
class HangLimits:
    """How long a rank may make no progress.

    Args:
        patience_s: `recovery.patience_s`.
        starting_s: in a new process, which imports, compiles and loads: `workers.start_timeout_s`.
        fixed_s: `recovery.hang_timeout_s`; None if limits are learned.
        first_step_s: the longest first step of a process or a generation so far; 0 if none was
            measured.
        abort_s: how much more time an abort may take.
        times: the step times of each rank.
        factors: as in `StepHistory`.
    """

    patience_s: float
    starting_s: float
    fixed_s: float | None = None
    first_step_s: float = 0.0
    abort_s: float = 0.0
    times: Mapping[int, StepTimes] = field(default_factory=lambda: MappingProxyType({}))
    factors: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def usual(self) -> Limit:
        """The limit where nothing is learned."""
        if self.fixed_s is not None:
            return self.fixed_s, "recovery.hang_timeout_s"
        return self.patience_s, "recovery.patience_s"

    def of(self, rank: RankProgress) -> float:
        return self._choose(rank)[0]

    def to_leave(self, rank: RankProgress) -> float:
        """Returns how long a rank may take to leave a generation that ends."""
        return max(self._choose(rank), self.usual)[0]

    def describe(self, rank: RankProgress) -> str:
        """Describes the limit of `to_leave` with the time for the abort, and its origin."""
        limit_s, origin = max(self._choose(rank), self.usual)
        abort = f" and {self.abort_s:.3g} s for the abort" if self.abort_s else ""
        return f"{limit_s + self.abort_s:.3g} s, {origin}{abort}"

    def _choose(self, rank: RankProgress) -> Limit:
        usual, phase = self.usual, rank.heartbeat.phase
        first = FIRST_STEP_FACTOR * self.first_step_s, "4 times the longest first step so far"
        if rank.is_starting:
            limits = [max(usual, (self.starting_s, "workers.start_timeout_s"))]
            if self.first_step_s and phase not in _STARTUP_PHASES:
                limits.append(max(usual, first))
            return min(limits)
        times = self.times.get(rank.rank)
        if self.fixed_s is not None or times is None or not times.usual_s:
            return usual
        if rank.is_first:
            compiled = COMPILED_FACTOR * times.usual_s, "60 of its steps, for it may compile again"
            return max(usual, first, compiled)
        limit_s, origin = max(self._learned(rank, times))
        raised_s = min(limit_s * self.factors.get(phase, 1.0), self.patience_s)
        if raised_s > limit_s:
            limit_s, origin = raised_s, "doubled after alarms that were false"
        learned = limit_s, origin
        return learned if self._is_learned(rank) else max(usual, learned)

    def _is_learned(self, rank: RankProgress) -> bool:
        """Returns whether the learned limit of a rank applies. It does not apply to a process that
        does not answer, until its node says that the process exists; to the function's own work
        between two steps, such as rank 0's files; and to a rank that waits for others."""
        beat = rank.heartbeat
        if rank.overdue_s:
            return rank.is_seen
        is_at_work = beat.phase == OUTSIDE_PHASE and not rank.state
        return beat.phase in _GAUGES and not beat.waiting and not is_at_work

    def _learned(self, rank: RankProgress, times: StepTimes) -> list[Limit]:
        """Returns the learned limits of a rank. If the rank does not answer, it may have come to
        another phase meanwhile, so the limits are those of all phases."""
        phase = rank.heartbeat.phase
        phases = [*_GAUGES] if rank.overdue_s or phase not in _GAUGES else [phase]
        factors = {OUTSIDE_PHASE: OUTSIDE_FACTOR}
        silences = [factors.get(p, SILENCE_FACTOR) * times.longest_s(p) for p in phases]
        return [
            (LEAST_LIMIT_S, "the least of what is learned"),
            (STEP_FACTOR * times.usual_s, "5 of its steps"),
            (max(silences), f"learned from its longest silences in phase {phase}"),
        ]

"""The hang policy: finds the rank that stalls a generation.

Ranks proceed in lockstep, so when one stops, the others wait for it in a collective and stop as
well. The culprit is the rank that does not wait where the others wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rayzero.workers.messages import Heartbeat

_STARTUP_PHASES = frozenset({"start", "join", "load"})

EARLY_RETURN_GRACE_S = 3.0
"""How long a rank waits for one that has returned before that counts as an early return: reports
of the two arrive in any order. No limit for a slow model: nobody will enter the collective."""

FIRST_STEP_FACTOR = 4
"""How many times as long as the longest so far the first step of a new process may be silent: its
node's caches may be cold, or the node slower."""
ABORT_S, ABORT_PER_COLLECTIVE_S = 0.5, 0.01
"""How long NCCL may take to abort a group, and for each collective that is queued on the device;
those of one step at most, because every step ends with a vote that the host reads."""
_UNRESPONSIVE_S = 1.0  # a busy machine does not explain a reply that is this late


@dataclass(frozen=True)
class RankProgress:
    """The last known progress of a rank that has not finished its function.

    Args:
        heartbeat: its last one in this generation; `age_s` is its age.
        overdue_s: how late the reply to the current poll is; 0 if it is not late.
        is_new: whether its process has not finished a step yet, in any generation.
    """

    node: str
    pid: int
    heartbeat: Heartbeat
    age_s: float = 0.0
    overdue_s: float = 0.0
    is_new: bool = False

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
    def position(self) -> tuple[int, int]:
        """Its step, and the collective it last entered."""
        return self.heartbeat.step, self.heartbeat.collective


@dataclass(frozen=True)
class Hang:
    """A stalled generation.

    Args:
        rank: the culprit; None if no rank is to blame.
        place: the line of the user's code it hangs in; empty: elsewhere, or unknown.
    """

    rank: int | None
    reason: str
    place: str = ""


@dataclass(frozen=True)
class HangLimits:
    """How long a rank may make no progress.

    Args:
        running_s: `recovery.hang_timeout_s`.
        starting_s: in a new process, which imports, compiles and loads: `workers.start_timeout_s`.
        first_step_s: the longest first step of a new process so far; 0: none was measured.
        abort_s: how much more time an abort may take.
    """

    running_s: float
    starting_s: float
    first_step_s: float = 0.0
    abort_s: float = 0.0

    def of(self, rank: RankProgress) -> float:
        return self._choose(rank)[0]

    def describe(self, rank: RankProgress) -> str:
        """The limit of a rank that is to leave, and where it comes from."""
        limit_s, origin = self._choose(rank)
        abort = f" and {self.abort_s:.3g} s for the abort" if self.abort_s else ""
        return f"{limit_s + self.abort_s:.3g} s, {origin}{abort}"

    def _choose(self, rank: RankProgress) -> tuple[float, str]:
        running = self.running_s, "recovery.hang_timeout_s"
        if not rank.is_starting:
            return running
        limits = [max(running, (self.starting_s, "workers.start_timeout_s"))]
        if self.first_step_s and rank.heartbeat.phase not in _STARTUP_PHASES:
            origin = f"{FIRST_STEP_FACTOR} times the longest first step of a process"
            limits.append(max(running, (FIRST_STEP_FACTOR * self.first_step_s, origin)))
        return min(limits)


def abort_limit_s(heartbeats: Iterable[Heartbeat], first_step: int) -> float:
    """How long aborting a group of NCCL may take, from the collectives of a step so far.

    Args:
        first_step: the generation's first, counted from 1.
    """
    per_step = [beat.collective / (1 + max(0, beat.step - first_step)) for beat in heartbeats]
    return ABORT_S + ABORT_PER_COLLECTIVE_S * max(per_step, default=0.0)


def find_hang(ranks: Sequence[RankProgress], limits: HangLimits) -> Hang | None:
    """The hang of a generation, if it has one. Meant to be called about once a second.

    A process that does not respond is to blame first; then, of the ranks that wait in no
    collective, or else of all, the one furthest behind. Its own silence counts, so a slow rank that
    makes progress is never blamed, however long the others wait. When all wait in the same
    collective, no rank failed but the network between them.

    Args:
        ranks: all active ranks of the generation.
    """
    limits_s = {rank.rank: limits.of(rank) for rank in ranks}
    if not any(rank.silent_s > limits_s[rank.rank] for rank in ranks):
        return None
    latest = max(ranks, key=lambda rank: rank.overdue_s)
    if latest.overdue_s > max(_UNRESPONSIVE_S, limits.running_s / 4):
        starting = latest.is_starting and latest.silent_s <= limits_s[latest.rank]
        return None if starting else Hang(latest.rank, _describe_unresponsive(latest))
    # Not by position first: a rank may wait for a collective after it launched later ones.
    behind = min(ranks, key=lambda rank: (rank.heartbeat.waiting, rank.position, -rank.silent_s))
    if behind.silent_s <= limits_s[behind.rank]:
        return None
    if behind.heartbeat.waiting and all(rank.position == behind.position for rank in ranks):
        # A rank whose reply is getting late may have been stopped there: wait until that is clear.
        return None if latest.overdue_s else Hang(None, _describe_network_hang(behind, len(ranks)))
    return Hang(behind.rank, _describe_late_rank(behind, ranks))


def find_overstaying(
    ranks: Iterable[RankProgress], limits: HangLimits, ending_s: float
) -> Hang | None:
    """A rank that does not leave a generation which ends, if there is one.

    A rank leaves at its next check for a stop. It may be in a long call until then, so it has as
    much time as a rank without progress in a running generation. A silence from before counts, but
    not that of a rank which waited for others: the abort has only now set it free.

    Args:
        ranks: all that have not left.
        ending_s: for how long the generation has been ending.
    """
    for rank in ranks:
        waited = rank.heartbeat.waiting and rank.overdue_s <= _UNRESPONSIVE_S
        before_s = 0.0 if waited or ending_s <= limits.abort_s else rank.silent_s
        if max(before_s, ending_s) > limits.of(rank) + limits.abort_s:
            stays = f"has not left its generation for {ending_s:.1f} s"
            return Hang(rank.rank, f"{rank} {stays}, in {rank.activity}")
    return None


def find_early_return(
    finished: Sequence[RankProgress], active: Iterable[RankProgress]
) -> Hang | None:
    """The rank that returned from the training function although another one waits for it, if there
    is one: in a collective after the last one that it entered.

    Args:
        finished: ranks whose function has returned.
        active: the others.
    """
    waiting = [rank for rank in active if rank.heartbeat.waiting and not rank.overdue_s]
    for early in sorted(finished, key=lambda rank: rank.position):
        for rank in waiting:
            if rank.position > early.position and rank.silent_s > EARLY_RETURN_GRACE_S:
                last, next_one = early.heartbeat, rank.heartbeat
                return Hang(
                    early.rank,
                    f"it returned from the training function in step {last.step}, after collective "
                    f"{last.collective}, but rank {rank.rank} waits for it in collective "
                    f"{next_one.collective} of step {next_one.step}: all ranks must run the same "
                    "steps",
                )
    return None


def _describe_unresponsive(rank: RankProgress) -> str:
    return (
        f"{rank} does not respond: its reply is {rank.overdue_s:.1f} s late; when it "
        f"last replied, {rank.age_s:.1f} s ago, it was in {rank.activity}"
    )


def _describe_late_rank(rank: RankProgress, ranks: Sequence[RankProgress]) -> str:
    text = f"{rank} has been silent for {rank.silent_s:.1f} s in {rank.activity}"
    ahead = [other.position for other in ranks if other is not rank and other.heartbeat.waiting]
    if not ahead:
        return text
    (step, collective), count = max(ahead), len(ahead)
    others = f"{count} ranks wait" if count > 1 else "another rank waits"
    return f"{text}; {others} for it, the furthest in collective {collective} of step {step}"


def _describe_network_hang(rank: RankProgress, count: int) -> str:
    return (
        f"all {count} ranks have been waiting for {rank.silent_s:.1f} s in collective "
        f"{rank.heartbeat.collective} of step {rank.heartbeat.step}, so no single rank hangs: "
        "check the network between their nodes"
    )

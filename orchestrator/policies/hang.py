"""Which rank keeps a generation from going on, when it no longer does.

All ranks of a generation move in step, so when one stops, the others wait for it in a collective
and stop as well. The culprit is the one that is not waiting where the others are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayzero.workers.messages import Heartbeat

START_GRACE_S = 300.0
"""How long a new process may be silent: it imports, compiles and loads."""

_STARTUP_PHASES = frozenset({"start", "join", "load"})


_UNRESPONSIVE_S = 1.0  # an answer that is so late is no longer late because the machine is busy


@dataclass(frozen=True)
class RankProgress:
    """What is known of one rank that has not finished its function.

    Args:
        heartbeat: its last one in this generation.
        age_s: how long ago that heartbeat came.
        overdue_s: how long the answer to the poll at hand should have been there; 0 if it is not
            late.
        new: whether its process has not finished a step yet, in any generation.
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

    @property
    def is_starting(self) -> bool:
        """Whether a long silence is to be expected of it."""
        return self.is_new or self.heartbeat.phase in _STARTUP_PHASES

    @property
    def silent_s(self) -> float:
        """How long it has made no progress, as far as is known."""
        return self.heartbeat.silent_s + (self.age_s if self.overdue_s else 0.0)

    @property
    def position(self) -> tuple[int, int]:
        """How far it is: its step, and the collective it last entered."""
        return self.heartbeat.step, self.heartbeat.collective


@dataclass(frozen=True)
class Hang:
    """A generation that does not go on.

    Args:
        rank: the culprit; None when nobody is to blame.
        why: rank, node, pid, phase, collective and silence, for the user to read.
    """

    rank: int | None
    reason: str


def find_hang(
    ranks: Sequence[RankProgress], hang_timeout_s: float, start_grace_s: float = START_GRACE_S
) -> Hang | None:
    """The stall of a generation, if it has one. To be asked again about once a second.

    A process that does not answer is to blame before all others; then, of the ranks that wait for
    nobody, or else of all, the one that is furthest behind. It is judged by its own silence, so
    that one which is slow but moves on is left alone however long the others wait. When all wait in
    one collective, it is not a rank that failed, but what lies between them.

    Args:
        ranks: all of a generation that still run.
        hang_timeout_s: silence that makes a stall.
        start_grace_s: the same for a rank that starts: it joins or loads, or its process is new.
    """
    limits_s = {one.rank: _silence_limit_s(one, hang_timeout_s, start_grace_s) for one in ranks}
    if not any(one.silent_s > limits_s[one.rank] for one in ranks):
        return None
    mute = max(ranks, key=lambda one: one.overdue_s)
    if mute.overdue_s > max(_UNRESPONSIVE_S, hang_timeout_s / 4):
        patient = mute.is_starting and mute.silent_s <= limits_s[mute.rank]
        return None if patient else Hang(mute.rank, _describe_unresponsive(mute))
    # Not by place first: a rank may wait in a collective long after it launched later ones.
    behind = min(ranks, key=lambda one: (one.heartbeat.waiting, one.position, -one.silent_s))
    if behind.silent_s <= limits_s[behind.rank]:
        return None
    if behind.heartbeat.waiting and all(one.position == behind.position for one in ranks):
        # One whose answer begins to be late may have been stopped in there: soon it will be known.
        return None if mute.overdue_s else Hang(None, _describe_network_hang(behind, len(ranks)))
    return Hang(behind.rank, _describe_late_rank(behind, ranks))


def _silence_limit_s(one: RankProgress, hang_timeout_s: float, start_grace_s: float) -> float:
    return max(hang_timeout_s, start_grace_s) if one.is_starting else hang_timeout_s


def _describe_unresponsive(one: RankProgress) -> str:
    return (
        f"{_format_rank(one)} does not answer: its answer is {one.overdue_s:.1f} s late; when it last "
        f"answered, {one.age_s:.1f} s ago, it was in {_format_activity(one)}"
    )


def _describe_late_rank(one: RankProgress, ranks: Sequence[RankProgress]) -> str:
    text = (
        f"{_format_rank(one)} has been silent for {one.silent_s:.1f} s in {_format_activity(one)}"
    )
    ahead = [other.position for other in ranks if other is not one and other.heartbeat.waiting]
    if not ahead:
        return text
    (step, collective), count = max(ahead), len(ahead)
    others = f"{count} ranks wait" if count > 1 else "another rank waits"
    return f"{text}; {others} for it, the furthest in collective {collective} of step {step}"


def _describe_network_hang(one: RankProgress, count: int) -> str:
    return (
        f"all {count} ranks have been waiting for {one.silent_s:.1f} s in collective "
        f"{one.heartbeat.collective} of step {one.heartbeat.step}, so none of them is to blame: "
        "look at the network between their nodes"
    )


def _format_rank(one: RankProgress) -> str:
    return f"rank {one.rank} on node {one.node} (pid {one.pid})"


def _format_activity(one: RankProgress) -> str:
    beat = one.heartbeat
    verb = "waiting in" if beat.waiting else "after"
    return f"phase {beat.phase} of step {beat.step}, {verb} collective {beat.collective}"

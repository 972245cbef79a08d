"""The hang policy: finds the rank that stalls a generation.

Ranks proceed in lockstep, so when one stops, the others wait for it in a collective and stop as
well. The culprit is the rank that does not wait where the others wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rayzero.engine.data.consumed import OUTSIDE_PHASE
from rayzero.orchestrator.policies.hang_limits import INPUT_PHASES, HangLimits, RankProgress
from rayzero.workers.messages import Heartbeat

EARLY_RETURN_GRACE_S = 3.0
"""How long a rank waits for a rank that has returned before the return counts as early: reports of
the two arrive in any order. This does not limit a slow model, because nobody will enter the
collective."""

ABORT_S, ABORT_PER_COLLECTIVE_S = 0.5, 0.01
"""How long NCCL may take to abort a group, and how much longer for each collective that is queued
on the device. Only those of one step are: every step ends with a vote that the host reads."""
_UNRESPONSIVE_S = 1.0  # a busy machine does not explain a reply that is this late
_STOPPED = frozenset("Tt")


@dataclass(frozen=True)
class Hang:
    """A stalled generation.

    Args:
        rank: the culprit; None if no rank is to blame.
    """

    rank: int | None
    reason: str


def abort_limit_s(heartbeats: Iterable[Heartbeat], first_step: int) -> float:
    """Returns how long aborting an NCCL group may take, judged by the collectives of a step so far.

    Args:
        first_step: the generation's first, counted from 1.
    """
    per_step = [beat.collective / (1 + max(0, beat.step - first_step)) for beat in heartbeats]
    return ABORT_S + ABORT_PER_COLLECTIVE_S * max(per_step, default=0.0)


def find_hang(ranks: Sequence[RankProgress], limits: HangLimits) -> Hang | None:
    """Returns the hang of a generation, if it has one. Meant to be called about once a second.

    The blame goes first to a process that is stopped, or that neither responds nor runs; then to a
    process that has not responded for long. Then it goes to the rank furthest behind: among the
    ranks that wait in no collective, or among all if all wait. The silence of that rank counts, so
    a slow rank that makes progress is never blamed, however long the others wait. If all wait in
    the same collective, the network between them failed, not a rank. If half of the ranks wait for
    input, the store of the data or the script is slow.

    Args:
        ranks: all active ranks of the generation.
    """
    if (stopped := find_stopped(ranks, limits)) is not None:
        return stopped
    limits_s = {rank.rank: limits.of(rank) for rank in ranks}
    if not any(rank.silent_s > limits_s[rank.rank] for rank in ranks):
        return None
    latest = max(ranks, key=lambda rank: rank.overdue_s)
    if latest.overdue_s > max(_UNRESPONSIVE_S, limits.usual[0] / 4):
        starting = latest.is_starting and latest.silent_s <= limits_s[latest.rank]
        return None if starting else Hang(latest.rank, _describe_unresponsive(latest))
    # Not by position first: a rank may wait for a collective after it launched later ones.
    behind = min(ranks, key=lambda rank: (_waits(rank), rank.position, -rank.silent_s))
    if behind.silent_s <= limits_s[behind.rank]:
        return None
    if _waits(behind) and all(rank.position == behind.position for rank in ranks):
        # A rank whose reply is getting late may have been stopped there: wait until that is clear.
        return None if latest.overdue_s else Hang(None, _describe_network_hang(behind, len(ranks)))
    is_learned = limits.fixed_s is None and behind.silent_s <= limits.patience_s
    if is_learned and _is_input_slow(ranks, behind):
        return Hang(None, _describe_slow_input(behind, limits))
    if behind.overdue_s > _UNRESPONSIVE_S:
        return Hang(behind.rank, _describe_unresponsive(behind))
    return Hang(behind.rank, _describe_late_rank(behind, ranks))


def find_stopped(ranks: Sequence[RankProgress], limits: HangLimits) -> Hang | None:
    """Returns a rank whose process is stopped, or that neither responds nor uses any CPU. If half
    of the ranks use no CPU, the storage of memory-mapped files is slow, and none of them is blamed.
    Returns None if the limit is set, because a debugger may have stopped the process."""
    if limits.fixed_s is not None:
        return None
    idle = [rank for rank in ranks if _is_idle(rank)]
    stopped = [rank for rank in idle if rank.state in _STOPPED]
    if not stopped and (len(idle) == 1 or 2 * len(idle) < len(ranks)):
        stopped = [rank for rank in idle if not rank.is_starting]
    if not stopped:
        return None
    rank = max(stopped, key=lambda rank: rank.overdue_s)
    what = "is stopped" if rank.state in _STOPPED else "does not run"
    return Hang(rank.rank, f"{_describe_unresponsive(rank)}; it {what} (state {rank.state})")


def _is_idle(rank: RankProgress) -> bool:
    return bool(rank.state) and rank.overdue_s > _UNRESPONSIVE_S


def _waits(rank: RankProgress) -> bool:
    """Returns whether a rank waits for other ranks. A process that does not respond may have
    continued since its last heartbeat."""
    return rank.heartbeat.waiting and not (rank.overdue_s > _UNRESPONSIVE_S and rank.is_seen)


def _is_input_slow(ranks: Sequence[RankProgress], behind: RankProgress) -> bool:
    """Returns whether half of the ranks or more lack input, including the rank behind, or are as
    late in its phase (all may compile again). Of two ranks both must be, unless the rank behind is
    in the script."""
    count, phase = sum(_lacks_input(rank, behind) for rank in ranks), behind.heartbeat.phase
    is_alone = len(ranks) == 1 and phase in INPUT_PHASES
    needed = 1 if is_alone or phase == OUTSIDE_PHASE else 2
    return _lacks_input(behind, behind) and count >= needed and 2 * count >= len(ranks)


def _lacks_input(rank: RankProgress, behind: RankProgress) -> bool:
    """Returns whether a rank is as late as the rank behind, in the same phase. The phases in
    which a rank waits for a store or is in the script count as one. If the rank behind is in one
    of these, a rank whose loader is reading counts, too: otherwise the loader would have read
    ahead."""
    if rank.overdue_s:
        return _is_idle(rank)
    phase = behind.heartbeat.phase
    places = INPUT_PHASES if phase in INPUT_PHASES else {phase}
    is_there = rank.heartbeat.phase in places and not rank.heartbeat.waiting
    is_late = is_there and 2 * rank.silent_s > behind.silent_s
    return is_late or (rank.reads and phase in INPUT_PHASES)


def find_overstaying(
    ranks: Sequence[RankProgress], limits: HangLimits, ending_s: float
) -> Hang | None:
    """Returns a rank that does not leave a generation which ends, if there is one.

    A rank leaves at its next check for a stop. It may be in a long call until then, so it has as
    much time as a rank without a learned limit. Its silence counts as in a running generation,
    except for a rank that waited for others: the abort has only now set it free.

    Args:
        ranks: all that have not left.
        ending_s: for how long the generation has been ending.
    """
    if (stopped := find_stopped(ranks, limits)) is not None:
        return stopped
    for rank in ranks:
        waited = rank.heartbeat.waiting and rank.overdue_s <= _UNRESPONSIVE_S
        before_s = 0.0 if waited or ending_s <= limits.abort_s else rank.silent_s
        limit_s = limits.of(rank)
        if rank.heartbeat.phase in INPUT_PHASES:  # the store may be slow for all ranks
            limit_s = limits.to_leave(rank)
        if before_s > limit_s + limits.abort_s or ending_s > limits.to_leave(rank) + limits.abort_s:
            stays = f"has not left its generation for {ending_s:.1f} s"
            return Hang(rank.rank, f"{rank} {stays}, in {rank.activity}")
    return None


def find_early_return(
    finished: Sequence[RankProgress], active: Iterable[RankProgress], limits: HangLimits
) -> Hang | None:
    """Returns the rank that returned from the training function although another rank waits for it,
    in a collective after the last one that it entered. Returns None if there is no such rank.

    The function's own collectives have no numbers, and a rank may return before the last one has
    ended on all ranks. A rank that waits at the same place therefore has `limits.usual`.

    Args:
        finished: ranks whose function has returned.
        active: the others.
    """
    waiting = [rank for rank in active if rank.heartbeat.waiting and not rank.overdue_s]
    for early in sorted(finished, key=lambda rank: rank.position):
        for rank in waiting:
            is_same = rank.position == early.position
            limit_s = limits.usual[0] if is_same else EARLY_RETURN_GRACE_S
            if rank.position >= early.position and rank.silent_s > limit_s:
                last, next_one = early.heartbeat, rank.heartbeat
                place = f"in collective {next_one.collective} of step {next_one.step}"
                if is_same:
                    place = f"since {rank.silent_s:.0f} s in step {next_one.step}"
                return Hang(
                    early.rank,
                    f"it returned from the training function in step {last.step}, after collective "
                    f"{last.collective}, but rank {rank.rank} waits for it {place}: all ranks must "
                    "run the same steps",
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


def _describe_slow_input(rank: RankProgress, limits: HangLimits) -> str:
    return (
        "half of the ranks or more wait for input, or are in the training function's code: "
        f"{rank} has been silent for {rank.silent_s:.1f} s in {rank.activity}; so no single rank "
        f"hangs, and it is waited for up to {limits.patience_s:g} s (recovery.patience_s): check "
        "the store of the data, and what the function does there"
    )


def _describe_network_hang(rank: RankProgress, count: int) -> str:
    return (
        f"all {count} ranks have been waiting for {rank.silent_s:.1f} s in collective "
        f"{rank.heartbeat.collective} of step {rank.heartbeat.step}, so no single rank hangs: "
        "check the network between their nodes"
    )

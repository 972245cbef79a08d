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
"""How long a rank waits for one that has returned before that counts as an early return: reports
of the two arrive in any order. No limit for a slow model: nobody will enter the collective."""

ABORT_S, ABORT_PER_COLLECTIVE_S = 0.5, 0.01
"""How long NCCL may take to abort a group, and for each collective that is queued on the device;
those of one step at most, because every step ends with a vote that the host reads."""
_UNRESPONSIVE_S = 1.0  # a busy machine does not explain a reply that is this late
_STOPPED = frozenset("Tt")


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


def abort_limit_s(heartbeats: Iterable[Heartbeat], first_step: int) -> float:
    """How long aborting a group of NCCL may take, from the collectives of a step so far.

    Args:
        first_step: the generation's first, counted from 1.
    """
    per_step = [beat.collective / (1 + max(0, beat.step - first_step)) for beat in heartbeats]
    return ABORT_S + ABORT_PER_COLLECTIVE_S * max(per_step, default=0.0)


def find_hang(ranks: Sequence[RankProgress], limits: HangLimits) -> Hang | None:
    """The hang of a generation, if it has one. Meant to be called about once a second.

    A process that is stopped, or that neither responds nor runs, is to blame first; then one that
    does not respond for long; then, of the ranks that wait in no collective, or else of all, the
    one furthest behind. Its own silence counts, so a slow rank that makes progress is never blamed,
    however long the others wait. When all wait in the same collective, no rank failed but the
    network between them; when half of them wait for input, its store or the script is slow.

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
    """A rank whose process is stopped; or one that neither responds nor uses any CPU, unless half
    of the ranks do so: then it is the storage of memory-mapped files. Not where the limit is
    set: a debugger may have stopped it."""
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
    """Whether it waits for other ranks. A process that does not respond may have gone on since."""
    return rank.heartbeat.waiting and not (rank.overdue_s > _UNRESPONSIVE_S and rank.is_seen)


def _is_input_slow(ranks: Sequence[RankProgress], behind: RankProgress) -> bool:
    """Whether half of the ranks or more lack input, the one behind among them, or are as late in
    its phase, as where all compile again; of two ranks both, unless the one is in the script."""
    count, phase = sum(_lacks_input(rank, behind) for rank in ranks), behind.heartbeat.phase
    is_alone = len(ranks) == 1 and phase in INPUT_PHASES
    needed = 1 if is_alone or phase == OUTSIDE_PHASE else 2
    return _lacks_input(behind, behind) and count >= needed and 2 * count >= len(ranks)


def _lacks_input(rank: RankProgress, behind: RankProgress) -> bool:
    """Whether it is where the rank behind is: in its phase; or, like that, it waits for a store, is
    in the script, or its loader reads, which would have read ahead."""
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
    """A rank that does not leave a generation which ends, if there is one.

    A rank leaves at its next check for a stop. It may be in a long call until then, so it has as
    much time as a rank without a learned limit. Its silence counts as in a running generation, but
    not that of a rank which waited for others: the abort has only now set it free.

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
        if rank.heartbeat.phase in INPUT_PHASES:  # perhaps of a slow store, which all wait for
            limit_s = limits.to_leave(rank)
        if before_s > limit_s + limits.abort_s or ending_s > limits.to_leave(rank) + limits.abort_s:
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

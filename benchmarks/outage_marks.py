"""Outages of a cluster's head as the finished steps of the job's ranks show them. Pure, but for
`read_marks`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Mark:
    """A step that a rank has finished, when `engine.step()` returned (Unix time)."""

    at_s: float
    generation: int
    step: int
    rank: int
    world_size: int
    pid: int


@dataclass
class Outage:
    """One outage; moments are Unix times.

    Args:
        away_s: from the end of the head's processes to the start of others.
        gcs_s: its GCS has accepted a connection again.
        worker_s: a worker was killed; 0: none was.
        process_s: Ray has begun to start a process for the job again.
        cpu_s: processor time of that process until it was seen to have the workers.
        reattached_s: the job's new process has the workers, by the journal; 0: it has outlived the
            head.
        ended: ranks, and processes of the job that outlive the head, which ended and were not
            killed.
        alone: steps that were finished until the head was back.
        redone: finished steps that were done again, until the next outage.
        stopped_s: longest time without a finished step; with a worker and the controller killed,
            only from the re-attachment on: a repair needs the controller.
    """

    away_s: float
    lost_s: float = 0.0
    worker_s: float = 0.0
    gcs_s: float = 0.0
    process_s: float = 0.0
    cpu_s: float = 0.0
    reattached_s: float = 0.0
    ended: int = 0
    alone: int = 0
    redone: int = 0
    stopped_s: float = 0.0

    @property
    def back_s(self) -> float:
        """Seconds from the head's return to the re-attachment; 0 without one."""
        return max(0.0, self.reattached_s - self.gcs_s)


def read_marks(folder: Path) -> list[Mark]:
    marks = []
    for path in folder.glob("marks-*.txt"):
        *lines, _ = path.read_text().split("\n")  # a killed process may leave a part of one
        marks += [Mark(*json.loads(line)) for line in lines]
    return marks


def finished_steps(marks: Iterable[Mark]) -> list[tuple[float, int, int]]:
    """The time of each step that all ranks of a generation have finished, the step, and the
    generation; by time."""
    ranks: defaultdict[tuple[int, int], list[Mark]] = defaultdict(list)
    for mark in marks:
        ranks[mark.generation, mark.step].append(mark)
    return sorted(
        (max(it.at_s for it in own), step, generation)
        for (generation, step), own in ranks.items()
        if len({it.rank for it in own}) == own[0].world_size
    )


def redone_steps(marks: Iterable[Mark]) -> list[tuple[float, int]]:
    """When a rank has done a step again that all ranks of an earlier generation had finished, and
    the step; each once."""
    marks = [*marks]
    done = {(generation, step) for _, step, generation in finished_steps(marks)}
    first = {step: min(g for g, other in done if other == step) for _, step in done}
    again: dict[int, float] = {}
    for mark in sorted(marks, key=lambda it: it.at_s):
        if mark.generation > first.get(mark.step, mark.generation):
            again.setdefault(mark.step, mark.at_s)
    return [(at_s, step) for step, at_s in again.items()]


def longest_pause_s(finished: Iterable[float], begin_s: float, end_s: float) -> float:
    """The longest time without a finished step between two moments."""
    inside = [at_s for at_s in finished if begin_s < at_s < end_s]
    return max(after - before for before, after in pairwise([begin_s, *inside, end_s]))


def judge(outages: list[Outage], marks: list[Mark], ended_s: float) -> None:
    """Fills in what the marks say of the outages."""
    finished = [at_s for at_s, _, _ in finished_steps(marks)]
    redone = redone_steps(marks)
    for outage, next_s in zip(outages, [*(it.lost_s for it in outages[1:]), ended_s], strict=True):
        until_s = (outage.reattached_s and outage.worker_s) or outage.gcs_s
        outage.alone = sum(outage.lost_s < at_s < until_s for at_s in finished)
        outage.redone = sum(outage.lost_s <= at_s < next_s for at_s, _ in redone)
        begin_s = (outage.worker_s and outage.reattached_s) or outage.lost_s
        last_s = max((at_s for at_s in finished if at_s < next_s), default=next_s)
        outage.stopped_s = longest_pause_s(finished, begin_s, max(last_s, begin_s))


def format_outage(outage: Outage) -> str:
    killed_s = outage.worker_s - outage.lost_s
    of_worker = f", a worker killed after {killed_s:.1f} s" * bool(outage.worker_s)
    return (
        f"away {outage.away_s:g} s{of_worker}: GCS after {outage.gcs_s - outage.lost_s:.1f} s, "
        f"re-attached {outage.back_s:.1f} s later, {outage.alone} steps alone, "
        f"{outage.redone} redone, longest pause {outage.stopped_s:.2f} s"
    )


def format_table(outages: list[Outage]) -> str:
    lines = [
        "| away s | worker killed | outages | steps alone | redone | re-attached, s: median, max "
        "| longest pause, s: median, max |",
        "|---|---|---|---|---|---|---|",
    ]
    for away_s, killed in sorted({(it.away_s, bool(it.worker_s)) for it in outages}):
        own = [it for it in outages if it.away_s == away_s and bool(it.worker_s) == killed]
        back, stopped = [it.back_s for it in own], [it.stopped_s for it in own]
        lines.append(
            f"| {away_s:g} | {'yes' if killed else 'no'} | {len(own)} "
            f"| {sum(it.alone for it in own)} | {sum(it.redone for it in own)} "
            f"| {median(back):.1f}, {max(back):.1f} "
            f"| {median(stopped):.2f}, {max(stopped):.2f} |"
        )
    return "\n".join(lines)

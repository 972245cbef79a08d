"""What the head's outages are judged by: finished steps, steps done again, pauses."""

from __future__ import annotations

from benchmarks.outage_marks import Mark, Outage, finished_steps, judge, redone_steps


def course(*steps: tuple[int, int, float, int]) -> list[Mark]:
    """Marks of `(generation, step, at_s, ranks)` of two ranks; the last one a moment later."""
    return [
        Mark(at_s + rank / 8, generation, step, rank, 2, 10 * generation + rank)
        for generation, step, at_s, ranks in steps
        for rank in range(ranks)
    ]


def test_a_step_counts_once_all_ranks_have_it_and_is_redone_in_a_later_generation() -> None:
    marks = course((1, 1, 1.0, 2), (1, 2, 2.0, 1), (2, 2, 5.0, 2), (2, 3, 6.0, 2))
    assert [(it[1], it[2]) for it in finished_steps(marks)] == [(1, 1), (2, 2), (3, 2)]
    assert redone_steps(marks) == []
    assert redone_steps([*marks, *course((3, 3, 7.0, 1))]) == [(7.0, 3)]


def test_pauses_of_an_outage_are_counted_from_the_attachment_where_a_worker_was_killed() -> None:
    marks = course((1, 1, 1.0, 2), (1, 2, 3.0, 2), (1, 3, 4.0, 2), (2, 4, 9.0, 2), (2, 5, 9.5, 2))
    quiet = Outage(1.0, lost_s=0.0, gcs_s=2.0, reattached_s=2.5)
    with_kill = Outage(3.0, lost_s=3.5, worker_s=4.5, gcs_s=7.0, reattached_s=8.0)
    judge([quiet, with_kill], marks, 10.0)
    assert (quiet.alone, quiet.stopped_s, quiet.redone) == (1, 2.0, 0)
    assert (with_kill.alone, with_kill.stopped_s, with_kill.back_s) == (1, 1.125, 1.0)

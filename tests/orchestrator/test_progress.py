from __future__ import annotations

import pytest

from rayzero.orchestrator.progress import JobProgress
from rayzero.workers.messages import StepReport


def report(rank: int, step: int, *, generation: int = 1, tokens: float = 0, **gauges: float):
    counters = {"tokens": tokens} if tokens else {}
    return StepReport(generation, rank, step, counters, gauges)


def started(world_size: int = 2) -> JobProgress:
    progress = JobProgress()
    progress.start_generation(generation=1, world_size=world_size)
    return progress


def test_a_step_is_complete_when_every_rank_has_finished_it():
    progress = started()
    assert progress.add_report(report(0, 1, tokens=10, loss=2.0, step_s=0.5)) is None
    assert progress.add_report(report(0, 2, tokens=10, loss=1.0, step_s=0.5)) is None
    record = progress.add_report(report(1, 1, tokens=30, loss=4.0, step_s=0.25, lr=0.1))
    assert record is not None
    assert (record.step, record.world_size, record.generation) == (1, 2, 1)
    assert record.loss == 3.0
    assert record.tokens == 40
    assert record.step_s == 0.5
    assert record.tokens_per_s == 80
    assert record.gauges == {"lr": 0.1}
    assert progress.steps == 1


def test_a_step_ends_when_its_last_rank_has_ended_it():
    progress = started()
    progress.add_report(StepReport(1, 0, 1, at_s=20.5))
    record = progress.add_report(StepReport(1, 1, 1, at_s=20.0))
    assert record is not None
    assert record.at_s == 20.5


def test_the_totals_of_the_job():
    progress = started(world_size=1)
    progress.add_report(report(0, 1, tokens=100, loss=8.0, step_s=50.0))
    assert progress.tokens_per_s == 2  # there is no better one yet
    progress.add_report(report(0, 2, tokens=100, loss=4.0, step_s=0.5))
    progress.add_report(report(0, 3, tokens=100, loss=2.0, step_s=0.3))
    progress.add_counters({"tokens": 50})
    assert (progress.first_loss, progress.last_loss, progress.steps) == (8.0, 2.0, 3)
    assert progress.tokens == 350
    assert progress.tokens_per_s == 200 / 0.8


def test_a_step_that_a_rank_did_not_live_to_report_is_told_by_the_others():
    progress = started()
    progress.add_report(report(0, 1, tokens=10, loss=2.0, step_s=0.5))  # finished: the state has it
    progress.add_report(report(0, 2, tokens=10))  # not finished
    (late,) = progress.start_generation(generation=2, world_size=1, step=1)
    assert (late.step, late.generation, late.world_size, late.loss) == (1, 1, 2, 2.0)
    assert (progress.steps, progress.steps_executed, progress.tokens) == (1, 1, 10)
    assert progress.start_generation(generation=3, world_size=1, step=1) == []


def test_tokens_are_the_engines_where_the_user_counts_none():
    progress = started()
    progress.add_report(report(0, 1, step_tokens=64))
    record = progress.add_report(report(1, 1, step_tokens=64))
    assert record is not None
    assert record.tokens == 64
    progress.add_report(report(0, 2, tokens=10, step_tokens=64))
    counted = progress.add_report(report(1, 2, tokens=10, step_tokens=64))
    assert counted is not None
    assert counted.tokens == 20


def test_what_all_wait_for_is_the_slowest_ranks():
    progress = started()
    progress.add_report(report(0, 1, **{"phases/data": 0.5, "phases/forward": 1.0}))
    record = progress.add_report(report(1, 1, **{"phases/data": 0.1, "phases/forward": 2.0}))
    assert record is not None
    assert record.waits == {"phases/data": 0.5}
    assert record.gauges["phases/data"] == pytest.approx(0.3)


def test_what_is_mirrored_is_what_every_rank_has_in_its_vault():
    progress = started()
    progress.add_report(report(0, 1, replica_step=1.0, replica_bytes=64.0))
    some = progress.add_report(report(1, 1))
    assert some is not None
    assert some.mirrored_step is None, "the other has nothing there yet"
    progress.add_report(report(0, 2, replica_step=2.0, replica_bytes=64.0))
    all_of_them = progress.add_report(report(1, 2, replica_step=1.0, replica_bytes=32.0))
    assert all_of_them is not None
    assert (all_of_them.mirrored_step, all_of_them.mirrored_bytes) == (1, 96.0)


def test_the_most_bytes_of_any_rank_at_any_step_by_class():
    progress = started()
    progress.add_report(report(0, 1, **{"bytes/main_weights": 10.0, "bytes/slots": 4.0}))
    progress.add_report(report(1, 1, **{"bytes/main_weights": 12.0}))
    progress.add_report(report(0, 2, **{"bytes/main_weights": 3.0}))
    progress.update_peaks({"process": 1000})
    assert progress.peak_bytes == {"main_weights": 12, "slots": 4, "process": 1000}


def test_a_job_that_reports_neither_loss_nor_tokens():
    progress = started(world_size=1)
    record = progress.add_report(report(0, 1, step_s=0.1))
    assert record is not None
    assert (record.loss, record.tokens_per_s) == (None, None)
    assert (progress.first_loss, progress.tokens_per_s) == (None, None)


def test_a_new_generation_forgets_what_the_old_one_left_unfinished():
    progress = started()
    progress.add_report(report(0, 5, tokens=10))
    progress.start_generation(generation=2, world_size=1)
    assert progress.add_report(report(1, 5, tokens=10)) is None  # of the old generation
    record = progress.add_report(report(0, 5, generation=2, tokens=7))
    assert record is not None
    assert (record.tokens, record.world_size) == (7, 1)
    assert progress.tokens == 7


def test_going_back_says_how_many_finished_steps_are_done_again_and_only_once():
    progress = started(world_size=1)
    for step in (1, 2, 3):
        progress.add_report(report(0, step))
    assert progress.rewind(1) == 2
    assert progress.rewind(1) == 0
    progress.start_generation(generation=2, world_size=2, step=1)
    assert (progress.steps, progress.steps_executed) == (1, 3)
    assert progress.rewind(5) == 0
    assert progress.world_sizes == [1, 2]

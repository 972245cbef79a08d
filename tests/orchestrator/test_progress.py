"""Steps, totals and peaks from the reports of the ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator import progress as progress_module
from rayzero.orchestrator.progress import JobProgress, RowAggregator, StepPace, StepRecord
from rayzero.workers.messages import StepReport
from rayzero.workers.step_rows import combine

ROWS = st.lists(st.dictionaries(st.sampled_from("abcd"), st.floats(-1e6, 1e6)), max_size=20)


def report(rank: int, step: int, *, generation: int = 1, tokens: float = 0, **gauges: float):
    counters = {"tokens": tokens} if tokens else {}
    return StepReport(generation, rank, step, counters, gauges)


def add(progress: JobProgress, report: StepReport) -> StepRecord | None:
    return progress.add_rows(combine([report.rank], [report]))


def started(world_size: int = 2) -> JobProgress:
    progress = JobProgress()
    progress.start_generation(generation=1, world_size=world_size)
    return progress


def test_step_is_complete_when_every_rank_has_finished_it():
    progress = started()
    first = report(0, 1, tokens=10, loss=2.0, step_s=0.5)
    assert add(progress, replace(first, at_s=20.5)) is None
    assert add(progress, report(0, 2, tokens=10, loss=1.0, step_s=0.5)) is None
    last = report(1, 1, tokens=30, loss=4.0, step_s=0.25, lr=0.1)
    record = add(progress, replace(last, at_s=20.0))
    assert record == StepRecord(1, 2, 1, 3.0, 40.0, 0.5, {"lr": 0.1}, at_s=20.5)
    assert record.tokens_per_s == 80
    assert json.loads(json.dumps(asdict(record)))["gauges"] == {"lr": 0.1}
    assert progress.steps == 1


def test_totals_of_job():
    progress = started(world_size=1)
    add(progress, report(0, 1, tokens=100, loss=8.0, step_s=50.0))
    assert progress.tokens_per_s == 2  # of the only step
    add(progress, report(0, 2, tokens=100, loss=4.0, step_s=0.5))
    add(progress, report(0, 3, tokens=100, loss=2.0, step_s=0.3))
    assert (progress.first_loss, progress.last_loss, progress.steps) == (8.0, 2.0, 3)
    assert progress.tokens_per_s == 200 / 0.8


def test_finished_step_without_report_of_lost_rank():
    progress = started()
    add(progress, report(0, 1, tokens=10, loss=2.0, step_s=0.5))  # finished: the state has it
    add(progress, report(0, 2, tokens=10))  # not finished
    (late,) = progress.start_generation(generation=2, world_size=1, step=1)
    assert (late.step, late.generation, late.world_size, late.loss) == (1, 1, 2, 2.0)
    assert (progress.steps, progress.steps_executed) == (1, 1)
    assert progress.start_generation(generation=3, world_size=1, step=1) == []


def of_two(progress: JobProgress, step: int, first: dict[str, Any], second: dict[str, Any]):
    add(progress, report(0, step, **first))
    return add(progress, report(1, step, **second))


def test_engine_tokens_are_used_if_user_reports_none():
    progress, engine = started(), {"step_tokens": 64}
    assert of_two(progress, 1, engine, engine).tokens == 64
    users = engine | {"tokens": 10}
    assert of_two(progress, 2, users, users).tokens == 20


def test_waits_are_maximum_over_ranks():
    second = {"phases/data": 0.1, "phases/forward": 2.0}
    record = of_two(started(), 1, {"phases/data": 0.5, "phases/forward": 1.0}, second)
    assert record.waits == {"phases/data": 0.5}
    assert record.gauges["phases/data"] == pytest.approx(0.3)


def test_step_is_mirrored_once_all_ranks_mirrored():
    progress = started()
    partial = of_two(progress, 1, {"replica_step": 1.0, "replica_bytes": 64.0}, {})
    assert partial.mirrored_step is None, "rank 1 has mirrored none"
    second = {"replica_step": 1.0, "replica_bytes": 32.0}
    complete = of_two(progress, 2, {"replica_step": 2.0, "replica_bytes": 64.0}, second)
    assert (complete.mirrored_step, complete.mirrored_bytes) == (1, 96.0)


def test_peak_bytes_by_class_over_ranks_and_steps():
    progress = started()
    add(progress, report(0, 1, **{"bytes/main_weights": 10.0, "bytes/slots": 4.0}))
    add(progress, report(1, 1, **{"bytes/main_weights": 12.0}))
    add(progress, report(0, 2, **{"bytes/main_weights": 3.0}))
    progress.update_peaks({"process": 1000})
    assert progress.peak_bytes == {"main_weights": 12, "slots": 4, "process": 1000}


def test_job_that_reports_neither_loss_nor_tokens():
    progress = started(world_size=1)
    record = add(progress, report(0, 1, step_s=0.1))
    assert (record.loss, record.tokens_per_s) == (None, None)
    assert (progress.first_loss, progress.tokens_per_s) == (None, None)


def test_new_generation_drops_unfinished_steps():
    progress = started()
    add(progress, report(0, 5, tokens=10))
    progress.start_generation(generation=2, world_size=1)
    assert add(progress, report(1, 5, tokens=10)) is None  # of the old generation
    record = add(progress, report(0, 5, generation=2, tokens=7))
    assert (record.tokens, record.world_size) == (7, 1)


def test_rewind_counts_steps_to_redo_only_once():
    progress = started(world_size=1)
    for step in (1, 2, 3):
        add(progress, report(0, step))
    assert progress.rewind(1) == 2
    assert progress.rewind(1) == 0
    progress.start_generation(generation=2, world_size=2, step=1)
    assert (progress.steps, progress.steps_executed) == (1, 3)
    assert progress.rewind(5) == 0
    assert progress.world_sizes == [1, 2]


@given(ROWS, st.integers(1, 5))
def test_sums_and_extremes_of_rows_of_any_shape(rows: list[dict[str, float]], fold: int):
    with patch.object(progress_module, "FOLD_ROWS", fold):
        aggregator = RowAggregator()
        for row in rows:
            aggregator.add_rows((*row,), [*row.values()])
        by_name = {name: [row[name] for row in rows if name in row] for name in "abcd"}
        by_name = {name: values for name, values in by_name.items() if values}
        assert aggregator.maxima() == {name: max(values) for name, values in by_name.items()}
        means = {name: sum(values) / len(values) for name, values in by_name.items()}
        assert aggregator.means() == pytest.approx(means, abs=1e-6)
        minima = {name: min(v) for name, v in by_name.items() if len(v) == len(rows)}
        assert aggregator.minima(len(rows)) == minima


def test_last_row_costs_no_more_than_others():
    aggregator = RowAggregator()
    waiting = 0
    for rank in range(1000):
        aggregator.add_rows(("loss",), [float(rank)])
        waiting = max(waiting, *map(len, aggregator._numbers.values()), 0)
    assert waiting < progress_module.FOLD_ROWS, "they are aggregated from time to time"
    assert aggregator.maxima() == {"loss": 999.0}


def test_pace_is_that_of_steps_without_one_time_work():
    """A resize's first step waits for new workers: it made 50 s left 7 minutes."""
    pace = StepPace()
    assert pace.remaining_s(0, 100) is None
    for step, (generation, step_s) in enumerate([(1, 9.0), (1, 0.5), (1, 0.5), (2, 30.0)], 1):
        pace.add(StepRecord(step, 2, generation, None, 0.0, step_s, {}))
        expected_s = 9.0 if step == 1 else 0.5
        assert pace.remaining_s(step, 100) == pytest.approx((100 - step) * expected_s)
    for step in range(5, 50):
        pace.add(StepRecord(step, 3, 2, None, 0.0, 0.25, {}))
    assert pace.step_s == pytest.approx(0.25, rel=0.05)
    assert pace.remaining_s(7, None) is None

"""What ranks read of their streams: sums over ranks and steps, rates, bounds."""

from __future__ import annotations

import pytest

from rayzero.orchestrator.metrics.snapshot import make_snapshot
from rayzero.orchestrator.metrics.snapshot_model import validate_snapshot
from rayzero.orchestrator.metrics.stream_table import MAX_SOURCES, StreamTable
from rayzero.orchestrator.progress import JobProgress, StepRecord
from rayzero.workers.messages import StepReport
from rayzero.workers.step_rows import combine
from tests.orchestrator.metrics.simulated_job import SimulatedJob, eventful_job


def record(step: int, step_s: float = 0.5, **counts: float) -> StepRecord:
    gauges = {f"streams/{name}": number for name, number in counts.items()}
    return StepRecord(step, 2, 1, None, 0.0, step_s, gauges)


def test_counters_of_ranks_are_added_up_and_a_step_that_is_not_finished_is_not_counted() -> None:
    progress = JobProgress()
    progress.start_generation(1, 2)
    for rank, samples in ((0, 3.0), (1, 4.0)):
        counters = {"tokens": 10.0, "streams/web/samples": samples}
        report = StepReport(1, rank, 1, counters, {"step_s": 0.5, "lr": 0.1})
        made = progress.add_rows(combine([rank], [report]))
    assert made is not None
    assert (made.tokens, made.gauges) == (20.0, {"lr": 0.1, "streams/web/samples": 7.0})
    assert not dict(made.user_gauges())
    progress.add_rows(combine([0], [StepReport(1, 0, 2, {"streams/web/samples": 3.0}, {})]))
    assert progress.start_generation(2, 1, 1) == []


def test_rates_are_smooth_and_shares_of_the_newest_step() -> None:
    table = StreamTable()
    for step in range(1, 201):  # a block of 800 bytes in every eighth step
        amounts = {"a/b/samples": 6.0, "c/samples": 2.0, "a/b/bytes": 800.0 * (step % 8 == 0)}
        curves = table.add_step(record(step, **amounts))
    assert curves["streams/a/b/samples_per_s"].mean == pytest.approx(12)
    assert curves["streams/c/samples_per_s"].mean == pytest.approx(4)
    assert curves["streams/a/b/bytes_per_s"].mean == pytest.approx(200, rel=0.5)
    assert table.by_source["a/b"].share == 0.75
    assert table.by_source["a/b"].totals == {"samples": 1200, "bytes": 800 * 25}
    assert table.by_source["c"].hit_ratio is None


def test_number_of_sources_is_bounded() -> None:
    table = StreamTable()
    table.add_step(record(1, **{f"{number}/samples": 1.0 for number in range(300)}))
    assert len(table.by_source) == MAX_SOURCES
    assert table.by_source["0"].share == pytest.approx(1 / 300)


def test_snapshot_has_the_sources() -> None:
    snapshot = make_snapshot(eventful_job().metrics)
    validate_snapshot(snapshot | {"ranks": []}, "the snapshot")
    assert snapshot["streams"]["web"]["hit_ratio"] == 1.0
    assert snapshot["streams"]["s3://b/code"]["share"] == 0.25
    assert snapshot["progress"]["data_wait_ratio"] == 0.25
    assert make_snapshot(SimulatedJob().metrics)["streams"] == {}

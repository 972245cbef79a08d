from __future__ import annotations

import json
from pathlib import Path

from rayzero.orchestrator.progress import JobProgress
from rayzero.orchestrator.results import JobTotals, remove_summary, summarize, write_summary

TOTALS = JobTotals("job", world_size=2, stage=2, seconds=1.5, return_value={})


def test_the_summary_has_all_its_keys_even_when_nothing_was_reported(tmp_path: Path):
    summary = summarize(TOTALS, JobProgress())
    assert summary == {
        "job": "job",
        "steps": 0,
        "world_size": 2,
        "stage": 2,
        "loss": {"first": None, "last": None},
        "tokens_per_s": None,
        "seconds": 1.5,
        "peak_bytes": {},
        "world_sizes": [],
    }
    path = write_summary(tmp_path, summary)
    assert json.loads(path.read_text()) == summary
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
    remove_summary(tmp_path)
    remove_summary(tmp_path)
    assert not path.exists()


def test_what_the_training_function_returned_is_merged_in():
    bits = {"first": 8.0, "last": 3.4}
    totals = JobTotals("job", 2, 2, 1.5, {"validation_bits_per_byte": bits})
    assert summarize(totals, JobProgress())["validation_bits_per_byte"] == bits


def test_what_the_job_went_through_is_in_the_summary():
    history = {"faults": {"lost": 2}, "repairs": 2, "steps_redone": 0}
    summary = summarize(JobTotals("job", 2, 2, 1.5, {}, history), JobProgress())
    assert {key: summary[key] for key in history} == history

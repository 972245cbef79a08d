from __future__ import annotations

import json
from pathlib import Path

from rayzero.orchestrator.progress import JobProgress
from rayzero.orchestrator.result import Totals, forget_summary, summarize, write_summary

TOTALS = Totals("job", world_size=2, stage=2, seconds=1.5, returned={})


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
    }
    path = write_summary(tmp_path, summary)
    assert json.loads(path.read_text()) == summary
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
    forget_summary(tmp_path)
    forget_summary(tmp_path)
    assert not path.exists()


def test_what_the_training_function_returned_is_merged_in():
    bits = {"first": 8.0, "last": 3.4}
    totals = Totals("job", 2, 2, 1.5, {"validation_bits_per_byte": bits})
    assert summarize(totals, JobProgress())["validation_bits_per_byte"] == bits

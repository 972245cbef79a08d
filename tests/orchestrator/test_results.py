from __future__ import annotations

import json
from pathlib import Path

from rayzero.orchestrator.results import JobResult, write_summary


def test_summary_is_written_atomically(tmp_path: Path):
    result = JobResult("job", {"job": "job", "steps": 3}, tmp_path / "summary.json")
    write_summary(result)
    assert json.loads(result.summary_path.read_text()) == result.metrics
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]

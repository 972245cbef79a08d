"""The summary of a job that has succeeded, on a disk that fails for a while. Virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job import save_summary as saving
from rayzero.orchestrator.results import JobResult, write_summary
from tests.orchestrator.support import VirtualClock, settle


async def save(folder: Path, outage_s: float, limit_s: float) -> list[str]:
    """Saves on a disk that fails for so long; returns the warnings."""
    clock, warnings = VirtualClock(), list[str]()
    result = JobResult("job", {"steps": 3}, folder / "summary.json")

    def write(summary: JobResult) -> None:
        if clock.now() < outage_s:
            raise OSError(30, "Read-only file system")
        write_summary(summary)

    async def in_loop(function: Callable[[JobResult], None], summary: JobResult) -> None:
        function(summary)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write_summary", write)
        patch.setattr(saving.asyncio, "to_thread", in_loop)
        task = asyncio.ensure_future(saving.save_summary(result, clock, limit_s, warnings.append))
        await settle()
        await clock.advance(limit_s)
        await task
    return warnings


async def test_outage_shorter_than_the_limit_is_waited_for(folder: Path):
    (warning,) = await save(folder, outage_s=30, limit_s=60)
    assert "retrying: [Errno 30] Read-only file system" in warning
    assert (folder / "summary.json").exists()


async def test_longer_outage_fails_the_job(folder: Path):
    with pytest.raises(JobFailedError, match=r"has succeeded, .* for 60 s: .*Read-only"):
        await save(folder, outage_s=100, limit_s=60)


def test_summary_is_written_atomically(tmp_path: Path):
    result = JobResult("job", {"job": "job", "steps": 3}, tmp_path / "summary.json")
    write_summary(result)
    assert json.loads(result.summary_path.read_text()) == result.metrics
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]

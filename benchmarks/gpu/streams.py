"""Stage: the GPU tests but those of parity. Without a GPU they are collected and skipped."""

from __future__ import annotations

from benchmarks.gpu.pytests import run_tests
from benchmarks.gpu.report import Report, Settings

SELECT = "not equals_plain_torch and not overflow and not resume and not two_ranks"


def run(report: Report, settings: Settings) -> None:
    run_tests(report, settings, SELECT)

"""Runs the GPU tests in a stage's process and turns each test's outcome into a check."""

from __future__ import annotations

import os
from collections import Counter
from importlib.util import find_spec
from typing import TYPE_CHECKING

from benchmarks.gpu.report import Report, Settings, StageSkippedError

if TYPE_CHECKING:
    import pytest

FOLDER = "tests/engine/gpu"
EXIT_S = 8.0
"""Before the stage's limit no further test is started."""
MESSAGE_CHARACTERS = 300
# They only tell in which order tests run, and write into the working tree.
OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=short", "--durations=0"]


class Recorder:
    """A pytest plugin. A failed test is a failed check; passed ones are one check at the end.

    Attributes:
        counts: of passed, failed, skipped tests, and of those for which there was no time.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self.counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Passes over the tests that would not end in time."""
        if self._report.left_s > EXIT_S:
            return None
        self.counts["no time"] += 1
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.partition("::")[2]
        if report.failed:
            self.counts["failed"] += 1
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            seen = " ".join(line[2:].strip() for line in lines)[:MESSAGE_CHARACTERS]
            self._report.check(test, False, seen or f"failed in {report.when}", "to pass")
        elif report.skipped:
            self.counts["skipped"] += 1
            self._reasons[_reason(report)] += 1
        elif report.when == "call":
            self.counts["passed"] += 1
            self._report.value("tests passed", self.counts["passed"])

    def finish(self, exit_status: int) -> None:
        """Records counts. `exit_status` is that of pytest."""
        self._report.value("tests", dict(self.counts))
        for reason, count in self._reasons.items():
            self._report.skip(f"{count} tests", reason)
        if self.counts["no time"]:
            self._report.skip(f"{self.counts['no time']} tests", "no time was left")
        passed = exit_status == 0 and not self.counts["failed"]
        self._report.check("pytest", passed, f"exit status {exit_status}", "exit status 0")


def run_tests(report: Report, settings: Settings, select: str) -> None:
    """Runs the tests in `FOLDER` that match the expression `select`.

    Raises:
        StageSkippedError: pytest or what the tests' settings import is missing.
    """
    missing = [it for it in ("pytest", "hypothesis", "psutil") if find_spec(it) is None]
    if missing:
        raise StageSkippedError(
            f"not installed: {', '.join(missing)} (pip install {' '.join(missing)})"
        )
    import pytest

    if not settings.on_gpu:
        os.environ["RAYZERO_GPU_TESTS_ON_CPU"] = "1"
    recorder = Recorder(report)
    status = pytest.main([FOLDER, "-k", settings.select or select, *OPTIONS], plugins=[recorder])
    recorder.finish(int(status))


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")

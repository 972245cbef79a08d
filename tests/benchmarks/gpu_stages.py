"""Stages that behave in every way that a stage can."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

from benchmarks.gpu import groups, profiles, resting, transfers, versions
from benchmarks.gpu.report import Report, Settings, StageSkippedError


def passing(report: Report, settings: Settings) -> None:
    report.check("one", True, 1, "1")
    report.value("environment", os.environ.get("STAGE_SAYS", "nothing"))
    print("a line of output")


def failing(report: Report, settings: Settings) -> None:
    report.check("two", False, 3, "2")


def raising(report: Report, settings: Settings) -> None:
    report.value("before", 1)
    raise ValueError("no such thing\nin two lines")


def hanging(report: Report, settings: Settings) -> None:
    report.value("before", 2)
    time.sleep(600)


def dying(report: Report, settings: Settings) -> None:
    report.value("before", 3)
    os.kill(os.getpid(), 6)


def skipping(report: Report, settings: Settings) -> None:
    raise StageSkippedError("there is none")


def staying(report: Report, settings: Settings) -> None:
    """Finishes, but its process does not end."""
    report.value("before", 4)
    threading.Thread(target=time.sleep, args=(600,)).start()


def sample(report: Report, settings: Settings) -> None:
    """Real stages in one process, as a dry run has them; the last one changes its device."""
    for number, stage in enumerate((versions, transfers, profiles, resting, groups)):
        folder = os.path.join(settings.folder, str(number))
        os.mkdir(folder)
        stage.run(report, replace(settings, folder=folder))

"""The process of one stage: `python -m benchmarks.gpu.child CALL`, with the call as JSON."""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Report, Settings, StageSkippedError


def run_call(call: dict[str, Any]) -> int:
    """Runs the stage and writes its report. Returns the exit status.

    Args:
        call: `module`; `report`, a path; `settings`, fields of `Settings`.
    """
    settings = Settings(**call["settings"])
    report = Report(Path(call["report"]), settings.limit_s)
    try:
        module, _, function = call["module"].partition(":")
        getattr(import_module(module), function or "run")(report, settings)
    except StageSkippedError as skip:
        report.finish(stage_skipped=str(skip))
    except BaseException as error:  # noqa: BLE001  also a SystemExit of pytest belongs in the report
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        report.finish(error=f"{type(error).__name__}: {lines[0]}".rstrip(": "))
        return 1
    else:
        report.finish()
    return 0


def run_forked(call: dict[str, Any], environment: dict[str, str], log: str) -> None:
    """`main` in a process of multiprocessing's: with a session and output of its own."""
    with suppress(PermissionError):
        os.setsid()  # what it starts is killed with it
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.exit(run_call(call))


if __name__ == "__main__":
    sys.exit(run_call(json.loads(sys.argv[1])))

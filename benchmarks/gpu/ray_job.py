"""Stage: a job whose only worker, with a GPU, is killed: seconds to its replacement's first step.

The replacement starts a process, imports torch and creates a CUDA context. Skipped without Ray.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.report import Report, Settings, StageSkippedError

NEEDED = ("ray", "pyarrow", "typer", "prometheus_client")


def run(report: Report, settings: Settings) -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise StageSkippedError(f"not installed: {', '.join(missing)}")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # the cluster is local
    from benchmarks import rayzero_job  # imports Ray
    from examples.gpt.prepare import prepare

    prepare(Path("data/stdlib"))
    kills = 1 if settings.small else 2
    gpus = int(settings.on_gpu)
    folder = Path(settings.folder, "job")
    plan = rayzero_job.Plan(1, "kill", kills, 2, 0, 60.0, folder, gpus=gpus)
    for number, cost in enumerate(rayzero_job.run(plan, print), start=1):
        report.value(f"kill {number}: to the next finished step_s", cost.total_s)
        report.value(f"kill {number}: parts_s", cost.parts)
        report.value(f"kill {number}: finished steps repeated", cost.steps_redone)
        report.value(f"kill {number}: step_ms", 1e3 * cost.median_step_s)
        passed = cost.steps_redone == 0
        report.check(f"kill {number}: no finished step is lost", passed, cost.steps_redone, "0")

"""The first ten minutes on a GPU: is it correct, what does it cost, how fast is it.

    python -m benchmarks.gpu --minutes 10 --json gpu.json
    python -m benchmarks.gpu --dry-run            # on CPUs, with small shapes
    python -m benchmarks.gpu --only parity,compare --systems ddp,fsdp2,rayzero-3

Every stage runs in its own process with a limit; the JSON file is complete after each of them. The
exit status is 1 if a stage is red. Without a GPU every run is a dry run.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Settings
from benchmarks.gpu.runner import Run, is_red
from benchmarks.gpu.stages import STAGES, Stage
from benchmarks.gpu.table import format_run

REQUIRED = ("torch", "numpy", "pydantic", "hjson", "safetensors", "xxhash")
"""Packages that the engine and the workers import. Neither needs Ray."""
PROBE_S = 120.0
DRY_RUN = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
"""The environment of a dry run: it leaves a GPU alone, and shares few cores with others."""


def missing_packages() -> str:
    """Which required packages are missing and how to install them; empty if none is."""
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if not missing:
        return ""
    names = " ".join(missing)
    return (
        f"missing: {names}; `pip install --target FOLDER {names}`, then `PYTHONPATH=FOLDER:. "
        "python -m benchmarks.gpu` (without a network, bring wheels for this Python)"
    )


def has_gpu() -> bool:
    """Whether torch sees a GPU, asked in another process: this one must not touch it."""
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], timeout=PROBE_S).returncode == 0


def choose_stages(only: str, parser: argparse.ArgumentParser) -> list[Stage]:
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {stage.name for stage in STAGES}
    if unknown:
        known = ", ".join(stage.name for stage in STAGES)
        parser.error(f"unknown stages {sorted(unknown)}; allowed: {known}")
    return [stage for stage in STAGES if not names or stage.name in names]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="stages: " + "; ".join(f"{stage.name}: {stage.title}" for stage in STAGES),
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="for all stages together")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="the result's file")
    parser.add_argument("--only", default="", help="comma-separated stages")
    parser.add_argument("--systems", default="", help="of the comparison, comma-separated")
    parser.add_argument("--stop-at-red", action="store_true", help="stop after a red stage")
    parser.add_argument("--dry-run", action="store_true", help="small shapes, on CPUs")
    options = parser.parse_args(arguments)
    stages = choose_stages(options.only, parser)
    if missing := missing_packages():
        print(missing, file=sys.stderr)
        return 2
    dry_run = options.dry_run or not has_gpu()
    if dry_run and not options.dry_run:
        print("no GPU is available: a dry run")
    signal.signal(signal.SIGTERM, _interrupt)
    systems = tuple(name for name in options.systems.split(",") if name)
    settings = Settings("cpu" if dry_run else "cuda", dry_run, 0.0, systems, "")
    run = Run(options.json, _facts(dry_run=dry_run), _say, DRY_RUN if dry_run else {})
    document = run.run(stages, settings, options.minutes, stop_at_red=options.stop_at_red)
    print(format_run(document))
    print(f"written: {options.json}")
    return int(any(is_red(result) for result in document["stages"]))


def _facts(*, dry_run: bool) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "dry_run": dry_run,
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
    }


def _say(line: str) -> None:
    print(line, flush=True)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

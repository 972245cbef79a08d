"""Stage: a device-side assert in a worker's process: what torch raises, whether the process lives,
and what rayzero makes of it.

The process is another one: its CUDA context is lost. Without a GPU a kernel fails on the tests'
NCCL-like device.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from time import monotonic, sleep

import torch

from benchmarks.gpu.report import Report, Settings, StageSkippedError
from benchmarks.gpu.worker_groups import (
    make_member,
    poison,
    run_as_training_thread,
    sum_of_ranks,
    use_nccl_like_device,
)
from rayzero.engine.device import get_device
from rayzero.workers.crash import describe_crash

LIVES_S = 3.0
"""How long the process is watched after the error: what NCCL's watchdog would do to it."""
HEALTH_S = 10.0
KIND = "device"


def run(report: Report, settings: Settings) -> None:
    call = json.dumps(asdict(settings))
    limit_s = max(report.left_s - 5.0, 5.0)
    command = [sys.executable, "-m", "benchmarks.gpu.device_assert", call]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        report.check(
            "the process ends", False, f"killed after {limit_s:.0f} s", "it ends by itself"
        )
    facts: dict[str, str] = {}
    for line in output.splitlines():
        if line.startswith("{"):
            facts |= json.loads(line)
    for name, fact in facts.items():
        report.value(name, fact)
    report.value("exit status", process.returncode)
    health = facts.get("health", "none")
    found = health.startswith("DeviceError")
    report.check("the health check finds it", found, health, "DeviceError")
    report.check("class told to the controller", facts.get("kind") == KIND, facts.get("kind"), KIND)
    seen = facts.get("lived", "it died")
    report.check("the process can still tell it", seen == "yes", seen, "yes")


def fail(settings: Settings) -> None:
    """Poisons this process's context, and prints what is seen, a line of JSON each."""
    use_nccl_like_device(settings)
    run_as_training_thread(partial(_fail_in_training, settings))


def _fail_in_training(settings: Settings) -> None:
    member = make_member(settings, 1)
    member.join()
    sum_of_ranks(member.device)
    error = _provoke(settings)
    _tell(raised=type(error).__name__, text=str(error).splitlines()[0])
    crash = describe_crash(error, 1, 0, 1)
    _tell(kind=crash.kind, told=crash.error.splitlines()[0])
    try:
        get_device(member.device).check_health(HEALTH_S)
        _tell(health="no error")
    except Exception as again:  # noqa: BLE001  what it raises is the finding
        _tell(health=f"{type(again).__name__}: {str(again).splitlines()[0]}")
    started_s = monotonic()
    try:
        member.abort()
        _tell(abort=f"{monotonic() - started_s:.2f} s")
    except Exception as failure:  # noqa: BLE001  likewise
        _tell(abort=f"{type(failure).__name__}: {str(failure).splitlines()[0]}")
    sleep(LIVES_S if settings.on_gpu else 0.0)
    _tell(lived="yes")


def _provoke(settings: Settings) -> Exception:
    try:
        poison(settings)
        torch.ones(1, device=settings.device).sum().item()
    except Exception as error:  # noqa: BLE001  what it raises is the finding
        return error
    raise StageSkippedError("an index out of bounds raised nothing")


def _tell(**facts: str) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    fail(Settings(**json.loads(sys.argv[1])))

"""Fault injection into worker processes, and the measured cost of a fault."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
MODEL: dict[str, Any] = {
    "layers": 4,
    "width": 256,
    "heads": 4,
    "context": 128,
}  # examples/gpt/job.yaml


@dataclass(frozen=True)
class FaultCost:
    """One injected fault and its recovery.

    Args:
        rank: the faulty rank.
        step: the last step finished before the fault.
        wall_s: from the fault (for a hang: from its detection) to the end of the next new step.
        step_s: duration of that step.
        median_step_s: median step time without faults; `usual_step_s`: its 95th percentile.
        detection_s: from a hang to its detection; 0 for a kill, whose detection is in `wall_s`.
        parts: duration of each recovery phase in seconds.
        steps_redone: finished steps that were repeated.
        restarted: other processes of the job that were restarted.
    """

    rank: int
    step: int
    wall_s: float
    step_s: float
    median_step_s: float
    steps_redone: int
    restarted: int
    detection_s: float = 0.0
    usual_step_s: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def hung_s(self) -> float:
        """From a hang to the end of the next step, minus that step."""
        return self.detection_s + self.total_s

    @property
    def total_s(self) -> float:
        """Cost of the fault: time to the end of the next step, minus that step."""
        return self.wall_s - self.step_s


def inject_fault(
    pid: int, fault: str, step_s: float, rng: random.Random, told: Path | None = None
) -> float:
    """Signal a process at a uniformly random point in a step. Returns the Unix time.

    Args:
        told: the file to write instead, for a process that hangs then.
    """
    time.sleep(rng.uniform(0.0, step_s))
    now_s = time.time()
    if told is None:
        os.kill(pid, SIGNALS[fault])
    else:
        part = told.with_suffix(".part")
        part.write_text(fault)
        part.rename(told)
    return now_s


def process_start_time(pid: int) -> int | None:
    """Start time in ticks since boot, or None if the process has exited.

    Together with the pid it identifies a process, because pids are reused.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if after_name[0] in "ZX" else int(after_name[19])

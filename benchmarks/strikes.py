"""What one fault cost, whichever system it struck; and what is common to striking."""

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
class Strike:
    """One fault and the way back.

    Args:
        rank: that was struck; None where the system does not tell.
        step: the last one finished before.
        wall_s: from the fault (a stop: from the verdict on it) to the end of the next new step.
        step_s: that step's own time, or an ordinary one's where the system does not tell.
        usual_s: an ordinary step's time, the median.
        noticed_s: from a stop to the verdict; 0 for a kill, whose notice is part of `wall_s`.
        parts: where the time went, in seconds, as far as the system tells.
        steps_redone: finished steps that were done again.
        restarted: other processes of the job that did not live on.
    """

    rank: int | None
    step: int
    wall_s: float
    step_s: float
    usual_s: float
    steps_redone: int
    restarted: int
    noticed_s: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """What the fault cost: the time to the next step's end, less that step."""
        return self.wall_s - self.step_s


def strike(pid: int, fault: str, step_s: float, draw: random.Random) -> float:
    """Strikes at a moment that is uniform over a step's time; the Unix time just before."""
    time.sleep(draw.uniform(0.0, step_s))
    now_s = time.time()
    os.kill(pid, SIGNALS[fault])
    return now_s


def born(pid: int) -> int | None:
    """When a process began, in ticks since boot, which tells it from a later one of the same
    number; None when it is gone."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if after_name[0] in "ZX" else int(after_name[19])

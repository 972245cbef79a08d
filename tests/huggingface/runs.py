"""Runs of scripts that use the libraries, and what they recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.scripts.together import HERE

ROOT = Path(__file__).parents[2]


RECORDED: dict[str, list[list[float]]] = json.loads(
    (HERE / "deepspeed_losses.json").read_text(encoding="utf-8")
)


def run(command: list[str], timeout_s: float = 1100) -> str:
    """What a command printed; python's scripts are those of this interpreter's environment."""
    variables = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    variables |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


# GRPO at stage 0: DeepSpeed reports no gradient norm there. Its stage 1 computes the same.
SAME_AS = {("trl_grpo", 3): 2}


def recorded(name: str, index: int) -> list[float] | None:
    """What DeepSpeed's run of a script has to print; None where none was recorded."""
    runs = dict(enumerate(RECORDED.get(name, [])))
    return runs.get(SAME_AS.get((name, index), index))

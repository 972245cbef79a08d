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


# DDP's, by `torchrun --nproc-per-node 2 NAME.py`, where DeepSpeed's were not recorded.
DDP_LOSSES = {
    # With ACCELERATE_USE_CPU=true. It brings no config: DeepSpeed's ranks would train alone, as
    # Accelerate finds no GPU.
    "accelerate_nlp": [
        *(0.6926331520080566, 0.6909686326980591, 0.6942183971405029, 0.6978262662887573),
        *(0.6925313472747803, 0.6892510652542114, 0.6901026964187622, 0.6900798082351685),
        *(0.6923568844795227, 0.6925336122512817, 0.689665675163269, 0.6923370361328125),
    ],
    # Without --deepspeed; losses and norms.
    "trl_online_dpo": [
        *(0.6931, 0.8403571248054504, 0.6874, 0.8096469044685364),
        *(0.7317, 0.7374534606933594, 0.701, 0.7447013854980469),
    ],
}


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

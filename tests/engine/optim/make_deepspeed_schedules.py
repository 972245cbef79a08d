"""Record again `deepspeed_schedules.json`: values of DeepSpeed 0.19.8's schedules, step by step.

Run manually where DeepSpeed is installed: `python -m tests.engine.optim.make_deepspeed_schedules`.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

LRS = [0.4, 0.04]  # of two parameter groups
STEPS = 22
FILE = Path(__file__).with_name("deepspeed_schedules.json")


def record_schedule(kind: str, params: dict[str, Any]) -> dict[str, Any]:
    """Record each step's learning rates and betas of all groups."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in LRS]
    optimizer = torch.optim.Adam(groups, lr=1.0)
    schedule = getattr(import_module("deepspeed.runtime.lr_schedules"), kind)(optimizer, **params)
    lrs, betas = [], []
    for _ in range(STEPS):
        lrs.append([group["lr"] for group in optimizer.param_groups])
        betas.append([list(group["betas"]) for group in optimizer.param_groups])
        schedule.step()
    schedule.step(3)
    return {
        "type": kind,
        "params": params,
        "lrs": lrs,
        "betas": betas,
        "attributes": read_attributes(schedule),
        "results": call_methods(schedule),
        "state": schedule.state_dict(),
    }


def read_attributes(schedule: Any) -> dict[str, Any]:
    """The public attributes that a schedule keeps, without functions and its optimizer."""
    kept = vars(schedule).items()
    return {
        name: value
        for name, value in kept
        if not name.startswith("_") and not callable(value) and name != "optimizer"
    }


def call_methods(schedule: Any) -> dict[str, Any]:
    """The results of the methods without arguments that a schedule has."""
    names = ("get_lr", "get_last_lr", "get_mom", "get_lr_ratio")
    return {name: getattr(schedule, name)() for name in names if hasattr(schedule, name)}


if __name__ == "__main__":
    cases = json.loads(FILE.read_text())  # a new one is a row of type and params
    rows = [json.dumps(record_schedule(case["type"], case["params"])) for case in cases]
    FILE.write_text("[\n" + ",\n".join(rows) + "\n]\n")

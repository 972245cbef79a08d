"""Generate `deepspeed_schedules.json`: values of DeepSpeed 0.19.8's schedules, step by step.

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
CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 5}),
    (
        "WarmupLR",
        {
            "warmup_min_lr": 0.01,
            "warmup_max_lr": 0.2,
            "warmup_num_steps": 5,
            "warmup_type": "linear",
        },
    ),
    (
        "WarmupLR",
        {"warmup_min_lr": [0.01, 0.02], "warmup_max_lr": [0.2, 0.3], "warmup_num_steps": 1},
    ),
    ("WarmupLR", {"warmup_num_steps": 6, "last_batch_iteration": 3}),
    ("WarmupDecayLR", {"total_num_steps": 14, "warmup_num_steps": 4}),
    (
        "WarmupDecayLR",
        {
            "total_num_steps": 14,
            "warmup_num_steps": 4,
            "warmup_min_lr": 1e-4,
            "warmup_max_lr": [0.2, 0.1],
            "warmup_type": "linear",
        },
    ),
    ("WarmupDecayLR", {"total_num_steps": 3, "warmup_num_steps": 6}),
    ("WarmupCosineLR", {"total_num_steps": 14, "warmup_num_steps": 4}),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 14,
            "warmup_num_steps": 4,
            "warmup_min_ratio": 0.2,
            "cos_min_ratio": 0.1,
            "warmup_type": "linear",
        },
    ),
    ("WarmupCosineLR", {"total_num_steps": 3, "warmup_num_steps": 6}),
    ("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 4, "last_batch_iteration": 5}),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 5}),
    (
        "OneCycle",
        {
            "cycle_min_lr": [0.01, 0.02],
            "cycle_max_lr": [0.1, 0.3],
            "cycle_first_step_size": 5,
            "cycle_second_step_size": 3,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.1,
            "cycle_min_mom": 0.7,
            "cycle_max_mom": [0.95, 0.9],
        },
    ),
    (
        "OneCycle",
        {
            **CYCLE,
            "cycle_first_step_size": 7,
            "cycle_first_stair_count": 3,
            "cycle_second_step_size": 5,
            "cycle_second_stair_count": 2,
            "decay_step_size": 3,
            "decay_lr_rate": 0.1,
        },
    ),
    (
        "OneCycle",
        {
            **CYCLE,
            "cycle_first_step_size": 6,
            "cycle_first_stair_count": 4,
            "cycle_momentum": False,
        },
    ),
    (
        "OneCycle",
        {
            **CYCLE,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 0,
            "decay_step_size": 4,
            "decay_lr_rate": 1.0,
        },
    ),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 4, "last_batch_iteration": 2}),
    ("LRRangeTest", {}),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 0.01,
            "lr_range_test_step_size": 4,
            "lr_range_test_step_rate": 5.0,
        },
    ),
    ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "cubic"}),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 1, "warmup_type": "cubic"}),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": [0.01, 0.1],
            "lr_range_test_step_size": 4,
            "lr_range_test_step_rate": 2.0,
            "lr_range_test_staircase": True,
        },
    ),
]


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
    rows = [json.dumps(record_schedule(kind, params)) for kind, params in CASES]
    FILE.write_text("[\n" + ",\n".join(rows) + "\n]\n")

"""Snapshots of a job as the page receives them."""

from __future__ import annotations

from math import exp, sin
from typing import Any

START_S = 1_700_000_000.0
PHASES = ("forward", "backward", "reduce", "update", "data", "mirror")
HTML = "<img src=x onerror=window.broken=1>&amp;\"'"


def sample(ranks: int = 4, state: str = "running", at_s: float = 4000.0) -> dict[str, Any]:
    """A snapshot with a value for every field, `at_s` seconds after the job's start."""
    seconds = {
        "productive": 3610.0,
        "recovery_load": 12.5,
        "recovery_detect": 3.1,
        "starting": 31.0,
    }
    seconds |= {"redone": 41.0, "data": 88.0, "waiting": 150.0, "checkpoint": 4.2}
    pending = max(0.0, at_s - sum(seconds.values()))
    return {
        "format": 2,
        "version": "0.1.0",
        "at_s": START_S + at_s,
        "job": "gpt-stdlib",
        "stage": 2,
        "state": state,
        "state_since_s": START_S + at_s - 300,
        "began_s": START_S,
        "generation": 3,
        "world_size": ranks,
        "workers": {"min": 2, "max": ranks},
        "progress": {
            "step": 12_345,
            "steps": 20_000,
            "remaining_s": 2481.0,
            "step_s": 0.324,
            "tokens_per_s": 81_920.0,
            "tokens": 3.2e8,
            "samples": 250_000.0,
            "last_step_at_s": START_S + at_s - 0.2,
        },
        "training": {
            "loss": 2.3456789,
            "learning_rate": 3.1e-4,
            "gradient_norm": 0.871,
            "loss_scale": 65536.0,
            "model_flops_utilization": 0.412,
            "skipped_steps": 3.0,
        },
        "loss": [
            [step, None if step == 4800 else 2.2 + 5 * exp(-step / 2000) + 0.1 * sin(step / 90)]
            for step in range(0, 12_346, 60)
        ],
        "goodput": {
            "ratio": seconds["productive"] / at_s,
            "wall_s": at_s,
            "unattributed_s": pending,
            "seconds": seconds,
        },
        "ranks": [rank(number) for number in range(ranks)],
        "generations": [
            {"at_s": START_S + 31, "generation": 1, "world_size": ranks},
            {"at_s": START_S + 1410, "generation": 2, "world_size": ranks - 1},
            {"at_s": START_S + 2100, "generation": 3, "world_size": ranks},
        ],
        "faults": [
            {
                "at_s": START_S + 1400,
                "cause": "lost",
                "rank": 1,
                "step": 4321,
                "text": f"rank 1 on node worker-7 (pid 23281) was lost in step 4321: {HTML}",
            }
        ],
        "recoveries": [
            {
                "at_s": START_S + 1411,
                "kind": "repair",
                "cause": "lost",
                "step": 4320,
                "steps_redone": 2,
                "world_size_before": ranks,
                "world_size": ranks - 1,
                "total_s": 0.31,
                "seconds": {"detect": 0.09, "load": 0.22},
            },
            {
                "at_s": START_S + 2101,
                "kind": "resize",
                "cause": "a replacement is ready",
                "step": 6540,
                "steps_redone": 0,
                "world_size_before": ranks - 1,
                "world_size": ranks,
                "total_s": 0.52,
                "seconds": {"drain": 0.2, "load": 0.32},
            },
        ],
        "checkpoints": [
            {"at_s": START_S + 700 * n, "step": 2000 * n, "bytes": 3.2e9, "seconds": 4.2}
            for n in range(1, 6)
        ],
        "checkpoint_failures": 1,
        "steps_redone": 2,
        "replicas": {"step": 12_345, "at_s": START_S + at_s - 0.2, "bytes": 1.9e9},
    }


def rank(number: int) -> dict[str, Any]:
    return {
        "rank": number,
        "node": f"worker-{number // 2}",
        "phase": PHASES[number % len(PHASES)],
        "step": 12_346,
        "silent_s": 14.0 if number == 3 else 0.02,
        "waiting": number % 3 == 2,
        "step_s": 0.324,
        "resident_bytes": 2.1e9,
    }


def empty() -> dict[str, Any]:
    """The snapshot of a job that has just started: optional values are unset."""
    value = sample(at_s=2.0, state="pending")
    no_entries: list[Any] = []
    value |= dict.fromkeys(
        ("loss", "ranks", "generations", "faults", "recoveries", "checkpoints"), no_entries
    )
    value |= {"stage": None, "generation": 0, "world_size": 0}
    value["progress"] = dict.fromkeys(value["progress"]) | {"step": 0}
    value["training"] = dict.fromkeys(value["training"]) | {"skipped_steps": 0.0}
    value["goodput"] = {"ratio": 0.0, "wall_s": 2.0, "unattributed_s": 2.0, "seconds": {}}
    value["replicas"] = {"step": None, "at_s": None, "bytes": 0.0}
    return value

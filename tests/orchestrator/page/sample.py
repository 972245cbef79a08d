"""Snapshots of a job as the page receives them."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, sin
from typing import Any

from rayzero.orchestrator.facts import (
    CheckpointEntry,
    FaultEntry,
    GenerationEntry,
    RecoveryEntry,
)
from rayzero.orchestrator.role_facts import RoleFaultEntry

START_S = 1_700_000_000.0
PHASES = ("forward", "backward", "reduce", "update", "data", "mirror")
HTML = "<img src=x onerror=window.broken=1>&amp;\"'"


def sample(ranks: int = 4, state: str = "running", at_s: float = 4000.0) -> dict[str, Any]:
    """A snapshot with a value for every field, `at_s` seconds after the job's start."""
    seconds = {"productive": 3610.0, "recovery_load": 12.5, "recovery_detect": 3.1}
    seconds |= {"starting": 31.0, "redone": 41.0, "data": 88.0, "waiting": 150.0, "checkpoint": 4.2}
    load = {"detect": 0.09, "load": 0.22}
    few = ranks - 1
    repair = RecoveryEntry(START_S + 1411, "repair", "lost", 4320, 2, ranks, few, 0.31, load)
    resize = RecoveryEntry(START_S + 2101, "resize", "it is ready", 6540, 0, few, ranks, 0.52, load)
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
        "roles": {"rollout": role(), "reward": role(scored=False)},
        "rollouts": {
            "waiting": {"rollout": 14, "reward": 0},
            "leased": {"rollout": 6, "reward": 3},
            "expired": {"rollout": 2, "reward": 0},
            "wait_s": {"rollout": 71.0, "reward": 5.0},
            "ready": 21,
            "read": 98_760,
            "published": 12_344,
            "nbytes": 3.2e8,
            "max_bytes": 2.0**30,
            "max_version_lag": 2,
            "lag_mean": 0.75,
            "lag_max": 1,
        },
        "streams": {
            "web": source(0.7, 0.999),
            f"s3://bucket/code/{HTML}": source(0.2, 0.9),
            "books": source(0.1, None),
        },
        "progress": {
            "data_wait_ratio": 0.031,
            "step": 12_345,
            "steps": 20_000,
            "remaining_s": 2481.0,
            "step_s": 0.324,
            "samples_per_s": 40.0,
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
        "usage": {"cpu_cores": 1.87, "gpu_utilization": 0.93},
        "loss": [[step, None if step == 600 else 2.3] for step in range(0, 12_346, 60)],
        "goodput": {
            "ratio": seconds["productive"] / at_s,
            "wall_s": at_s,
            "unattributed_s": pending,
            "seconds": seconds,
        },
        "ranks": [rank(number) for number in range(ranks)],
        "generations": [
            vars(GenerationEntry(START_S + at_s, number, size))
            for at_s, number, size in (
                (31, 1, ranks),
                (1400, 1, ranks - 2),
                (1410, 2, ranks - 1),
                (2100, 3, ranks),
            )
        ],
        "faults": [vars(FaultEntry(START_S + 1400, "lost", 1, 4321, f"rank 1 was lost: {HTML}"))],
        "recoveries": [vars(repair), vars(resize)],
        "checkpoints": [
            vars(CheckpointEntry(START_S + 700 * n, 2000 * n, 3.2e9, 4.2)) for n in range(1, 6)
        ],
        "checkpoint_failures": 1,
        "steps_redone": 2,
        "replicas": {"step": 12_345, "at_s": START_S + at_s - 0.2, "bytes": 1.9e9},
    }


def role(scored: bool = True) -> dict[str, Any]:
    """A role of which a worker was lost, and started again."""
    sizes = ((40, 1), (41, 2), (42, 3), (1800, 2), (1806, 3))
    fault = RoleFaultEntry(START_S + 1800, "hang", 1, f"rollout 1 on node a hangs: {HTML}")
    return {
        "min": 1,
        "max": 4,
        "workers": 3,
        "finished": 0,
        "faults": {"hang": 1} if scored else {},
        "generations": [{"at_s": START_S + at_s, "world_size": size} for at_s, size in sizes],
        "seen_faults": [vars(fault)] if scored else [],
        "tokens_per_s": 41_237.0 if scored else None,
        "version": 12_343 if scored else None,
        "values": {"reward": {"mean": 0.6172, "low": -1.0, "high": 1.0}} if scored else {},
    }


def source(share: float, hit_ratio: float | None) -> dict[str, Any]:
    """A source of a stream."""
    return {
        "samples": int(493_800 * share),
        "blocks": int(1934 * share),
        "bytes": int(3.1e10 * share),
        "samples_per_s": 40 * share,
        "bytes_per_s": 1.9e7 * share,
        "share": share,
        "hit_ratio": hit_ratio,
    }


def history(job: str = "gpt-stdlib", shift: float = 0.0) -> dict[str, Any]:
    """Its /history.json."""
    steps = range(0, 12_346, 60)

    def curve(value: Callable[[int], float], spread: float = 0.0) -> list[list[float | int | None]]:
        return [[at, value(at), value(at) - spread, value(at) + spread, 0] for at in steps]

    curves = {
        "loss": curve(lambda at: 2.2 + shift + 5 * exp(-at / 2000) + 0.1 * sin(at / 90), 0.2),
        "lr": [[at, 3e-4 * min(1.0, at / 1000)] for at in steps],
        "grad_norm": curve(lambda at: 0.9 + 0.3 * sin(at / 50), 0.3),
        "tokens_per_s": curve(lambda at: 81_920 + 2000 * sin(at / 300), 1500.0),
        "step_s": curve(lambda at: 0.324 + 0.01 * sin(at / 300), 0.01),
        "mfu": curve(lambda at: 0.41 + 0.01 * sin(at / 300)),
        "samples_per_s": curve(lambda at: 40 + sin(at / 300)),
        "cpu_cores": curve(lambda at: 1.9 + 0.1 * sin(at / 20)),
        "gpu_utilization": curve(lambda at: 0.93 + 0.05 * sin(at / 40)),
        "resident_bytes": curve(lambda at: 2.1e9),
        "device_peak_bytes": curve(lambda at: 6.1e9 + 1e9 * (at > 3000)),
        "elapsed_s": [
            [at, 31 + at * 0.32, 31 + at * 0.32, 31 + (at + 59) * 0.32, 0] for at in steps
        ],
        "user/accuracy": curve(lambda at: 1 - exp(-at / 5000) + 0.01 * sin(at)),
        f"user/{HTML}": [[1, 1.0]],
        "roles/rollout/reward": curve(lambda at: 1 - 0.7 * exp(-at / 4000), 0.3),
        "roles/rollout/tokens_per_s": curve(lambda at: 41_000 + 900 * sin(at / 200)),
        "roles/rollout/task_wait_s": curve(lambda at: 0.05 + 0.02 * sin(at / 70)),
        "roles/rollout/weights_wait_s": curve(lambda at: 0.01 + 0.004 * sin(at / 40)),
        "roles/reward/task_wait_s": curve(lambda at: 0.2 + 0.05 * sin(at / 90)),
        "streams/web/samples_per_s": curve(lambda at: 28.0),
        "streams/books/samples_per_s": curve(lambda at: 12.0),
        "streams/web/bytes_per_s": curve(lambda at: 1.3e7 + 2e6 * sin(at / 40)),
        "streams/books/bytes_per_s": curve(lambda at: 2e6 + 4e5 * sin(at / 70)),
        "rollouts/ready": curve(lambda at: 20 + 6 * sin(at / 150)),
        "rollouts/leased": curve(lambda at: 9 + 2 * sin(at / 50)),
        "rollouts/lag": curve(lambda at: 0.8 + 0.2 * sin(at / 80), 0.2),
    }
    curves["loss"][80][1:] = [None, None, None, 60]
    for index, phase in enumerate(("data", "forward", "backward", "reduce", "update", "mirror")):
        seconds = (0.02, 0.09, 0.14, 0.03, 0.003, 0.001)[index]
        curves[f"phases/{phase}"] = curve(lambda at, s=seconds: s * (1 + 0.05 * sin(at / 200)))
    return {
        "format": 1,
        "job": job,
        "at_s": START_S + 4000,
        "curves": curves,
        "names_without_curve": ["one/too/many"],
        "log": [f"step {step}/20000 | loss 2.{step} | {HTML}" for step in range(12_000, 12_200)],
        "config": {"name": job, "steps": 20_000, "workers": {"min": 2, "max": 4, "gpus": 1}},
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
        "cpu_cores": 1.87,
        "gpu_utilization": 0.93,
    }


def empty() -> dict[str, Any]:
    """The snapshot of a job that has just started: optional values are unset."""
    value = sample(at_s=2.0, state="pending")
    no_entries: list[Any] = []
    value |= dict.fromkeys(
        ("ranks", "generations", "faults", "recoveries", "checkpoints"), no_entries
    )
    value |= {"stage": None, "generation": 0, "world_size": 0, "rollouts": None}
    value["roles"] = {"rollout": {"min": 1, "max": 4, "workers": 0, "faults": {}}}
    value["progress"] = dict.fromkeys(value["progress"]) | {"step": 0}
    value["usage"] = dict.fromkeys(value["usage"])
    value["training"] = dict.fromkeys(value["training"]) | {"skipped_steps": 0.0}
    value["goodput"] = {"ratio": 0.0, "wall_s": 2.0, "unattributed_s": 2.0, "seconds": {}}
    value["replicas"] = {"step": None, "at_s": None, "bytes": 0.0}
    return value


def empty_history() -> dict[str, Any]:
    return history() | {"curves": {}, "log": [], "names_without_curve": []}

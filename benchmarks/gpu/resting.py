"""Stage: from step 3 on memory stays the same, and between steps it is what `rayzero plan` says."""

from __future__ import annotations

import gc
from typing import Any

import torch

from benchmarks.gpu.one_rank import (
    CPU_OFFLOAD,
    MODEL,
    SMALL,
    make_config,
    make_trainee,
    single_rank_group,
    store,
)
from benchmarks.gpu.report import Report, Settings
from examples.gpt.model import GPT
from rayzero.engine.config import parse_config
from rayzero.engine.planning.persistent import persistent_bytes

SETTLED, STEPS = 3, 6
SLACK_BYTES = 96 << 20
"""cuBLAS's workspaces, the batch and the loss, which the plan does not count."""


def run(report: Report, settings: Settings) -> None:
    if not settings.on_gpu:
        report.skip("memory of the allocator", "no GPU: only the engine's count is compared")
    for stage in range(4):
        for name, offload in {"": {}, ", optimizer on the CPU": CPU_OFFLOAD}.items():
            _run_case(report, settings, f"stage {stage}{name}", make_config(stage, **offload))


def _run_case(report: Report, settings: Settings, name: str, config: dict[str, Any]) -> None:
    with single_rank_group(store(settings, name)):
        before = _allocated(settings)
        trainee = make_trainee(settings, config)
        trainee.steps(SETTLED)
        settled, settled_peak = _steady(settings)
        trainee.steps(STEPS)
        after, peak = _steady(settings)
        with torch.device("meta"):
            model = GPT(SMALL if settings.small else MODEL)
        planned = persistent_bytes(model, parse_config(config), 1)
        counted = trainee.engine.metrics.bytes
        trainee.engine.close()
    del trainee
    gc.collect()
    if settings.on_gpu:
        report.check(
            f"{name}: allocated is that of step {SETTLED}", after == settled, after, str(settled)
        )
        report.check(f"{name}: so is the peak", peak <= settled_peak, peak, str(settled_peak))
    differing = {
        key: (size, planned.get(key, 0))
        for key, size in counted.items()
        if size != planned.get(key, 0) and not _differs_on_cpu(key, settings)
    }
    report.check(f"{name}: counted as planned", not differing, differing or "equal", "{}")
    # What only the plan has exists during a step.
    on_device = sum(planned[it] for it in planned.keys() & counted.keys() if not _is_on_host(it))
    report.value(f"{name}: planned_bytes", on_device)
    if settings.on_gpu:
        held = after - before
        report.value(f"{name}: allocated_bytes", held)
        report.value(f"{name}: left behind_bytes", _allocated(settings) - before)
        passed = abs(held - on_device) <= SLACK_BYTES + on_device // 50
        report.check(f"{name}: allocated as planned", passed, held, f"{on_device}, within 2 %")


def _is_on_host(key: str) -> bool:
    return key.startswith(("host_", "disk_"))


def _differs_on_cpu(key: str, settings: Settings) -> bool:
    """Classes of which a run whose device is the host has others than the plan for a GPU."""
    return not settings.on_gpu and key.startswith(("host_", "main", "opt", "staging"))


def _allocated(settings: Settings) -> int:
    return torch.cuda.memory_allocated() if settings.on_gpu else 0


def _steady(settings: Settings) -> tuple[int, int]:
    """Allocated bytes now, and their peak since the last call."""
    if not settings.on_gpu:
        return 0, 0
    torch.cuda.synchronize()
    now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return now, peak

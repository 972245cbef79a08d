"""Stage: where a step of stages 2 and 3 goes: kernels by time, launches, the time that the GPU does
nothing, and what the host does."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.one_rank import make_config, make_trainee, single_rank_group, store
from benchmarks.gpu.report import Report, Settings
from benchmarks.gpu.timeline import exposed_from_timeline, union

STAGES = (2, 3)
WARMUP, STEPS = 5, 3
ROWS = 12
NAME_CHARACTERS = 90


def run(report: Report, settings: Settings) -> None:
    for stage in STAGES:
        with single_rank_group(store(settings, str(stage))):
            trainee = make_trainee(settings, make_config(stage))
            trainee.steps(WARMUP)
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if settings.on_gpu else []
            with profile(activities=activities) as profiler:
                trainee.steps(STEPS)
                if settings.on_gpu:
                    torch.cuda.synchronize()
            trainee.engine.close()
        _report_host(report, stage, profiler)
        if settings.on_gpu:
            _report_device(report, stage, profiler)
        else:
            report.skip(f"stage {stage}: kernels", "no GPU: only the host's side")


def _report_host(report: Report, stage: int, profiler: Any) -> None:
    averages = sorted(profiler.key_averages(), key=lambda it: -it.self_cpu_time_total)
    for row in averages[:ROWS]:
        ms = row.self_cpu_time_total / 1e3 / STEPS
        name = row.key[:NAME_CHARACTERS]
        report.value(f"stage {stage}, host: {name}_ms", {"self": ms, "calls": row.count / STEPS})


def _report_device(report: Report, stage: int, profiler: Any) -> None:
    kernels = [
        (event.name, (event.time_range.start / 1e6, event.time_range.end / 1e6))
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    seconds: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for name, (start, end) in kernels:
        seconds[name] += end - start
        calls[name] += 1
    busy = union(span for _, span in kernels)
    if not busy:
        report.skip(f"stage {stage}: kernels", "the profiler recorded none")
        return
    busy_s, span_s = sum(end - start for start, end in busy), busy[-1][1] - busy[0][0]
    exposed = exposed_from_timeline(kernels, STEPS)
    report.value(f"stage {stage}: kernels a step", len(kernels) / STEPS)
    report.value(f"stage {stage}: idle, share", 1 - busy_s / span_s)
    report.value(f"stage {stage}: exposed communication_ms", 1e3 * exposed.communication_s)
    report.value(f"stage {stage}: exposed copies_ms", 1e3 * exposed.copies_s)
    for name, total_s in sorted(seconds.items(), key=lambda it: -it[1])[:ROWS]:
        row = {"total": 1e3 * total_s / STEPS, "calls": calls[name] / STEPS}
        report.value(f"stage {stage}, GPU: {name[:NAME_CHARACTERS]}_ms", row)

"""Exposed communication on a GPU timeline: the time that does not overlap with computation.

It cannot be measured on the host, which only enqueues kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]


@dataclass(frozen=True)
class Exposed:
    """Seconds per step without computation, by cause."""

    communication_s: float
    copies_s: float  # between host memory and the GPU


def profile_exposed(step: Callable[[], object], steps: int) -> Exposed:
    """Run `steps` steps under torch's profiler and return the mean per step."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kernels = [
        (event.name, (event.time_range.start / 1e6, event.time_range.end / 1e6))
        for event in profiler.events() or ()
        # annotations are labeled ranges, not kernels
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    return exposed_from_timeline(kernels, steps)


def exposed_from_timeline(kernels: Iterable[tuple[str, Span]], steps: int) -> Exposed:
    """Exposed time from kernel names and their spans in seconds."""
    kinds: dict[str, list[Span]] = {"communication": [], "copy": [], "computation": []}
    for name, span in kernels:
        kinds[_kind(name)].append(span)
    computation = union(kinds["computation"])
    return Exposed(
        _outside(union(kinds["communication"]), computation) / steps,
        _outside(union(kinds["copy"]), computation) / steps,
    )


def _kind(name: str) -> str:
    if "nccl" in name.lower():
        return "communication"
    # device-to-device copies are part of the computation
    return "copy" if "HtoD" in name or "DtoH" in name else "computation"


def union(spans: Iterable[Span]) -> list[Span]:
    """Union of the spans as sorted disjoint spans."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _outside(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """Total time of `spans` outside of `others`. Both must come from `_union`."""
    total, index = 0.0, 0
    for start, end in spans:
        total += end - start
        while index < len(others) and others[index][1] <= start:
            index += 1
        for other_start, other_end in others[index:]:
            if other_start >= end:
                break
            total -= min(end, other_end) - max(start, other_start)
    return total

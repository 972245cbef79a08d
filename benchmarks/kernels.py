"""What a GPU's timeline says of communication: how long it ran beside no computation.

Such seconds are exposed. The host's clock cannot tell them: it enqueues kernels and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]


@dataclass(frozen=True)
class Exposed:
    """Seconds of a step in which nothing was computed, and why."""

    communication_s: float
    copies_s: float  # between host memory and the GPU


def exposed_in(step: Callable[[], object], steps: int) -> Exposed:
    """Runs `steps` steps under torch's profiler; the mean of each."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kernels = [
        (event.name, (event.time_range.start / 1e6, event.time_range.end / 1e6))
        for event in seen.events() or ()
        # annotations are named stretches of a timeline, in which nothing need run
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    return of_timeline(kernels, steps)


def of_timeline(kernels: Iterable[tuple[str, Span]], steps: int) -> Exposed:
    """The same, of kernels' names and when they ran, in seconds."""
    kinds: dict[str, list[Span]] = {"communication": [], "copy": [], "computation": []}
    for name, span in kernels:
        kinds[_kind(name)].append(span)
    computation = _union(kinds["computation"])
    return Exposed(
        _outside(_union(kinds["communication"]), computation) / steps,
        _outside(_union(kinds["copy"]), computation) / steps,
    )


def _kind(name: str) -> str:
    if "nccl" in name.lower():
        return "communication"
    # a copy within the GPU is part of a computation
    return "copy" if "HtoD" in name or "DtoH" in name else "computation"


def _union(spans: Iterable[Span]) -> list[Span]:
    """The same moments as spans that do not overlap, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _outside(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """Seconds of `spans` that are in none of `others`; both as `_union` gives them."""
    left, at = 0.0, 0
    for start, end in spans:
        left += end - start
        while at < len(others) and others[at][1] <= start:
            at += 1
        for other_start, other_end in others[at:]:
            if other_start >= end:
                break
            left -= min(end, other_end) - max(start, other_start)
    return left

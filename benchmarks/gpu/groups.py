"""Stage: process groups made and aborted many times in one process; an abort of a host read.

Without a GPU it runs on the tests' NCCL-like device.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import partial
from statistics import median
from time import monotonic, sleep

import torch
import torch.distributed as dist

from benchmarks.gpu.report import Report, Settings
from benchmarks.gpu.worker_groups import (
    Member,
    count_resources,
    make_member,
    run_as_training_thread,
    stall,
    sum_of_ranks,
    use_nccl_like_device,
)
from rayzero.engine.device import get_device

CYCLES, SMALL_CYCLES = 20, 6
SETTLED = 3  # of the cycles: contexts and caches exist
# What a cycle may keep; the NCCL-like group keeps a pipe, and its stream a thread.
KEPT = {"threads": 0, "descriptors": 0, "gpu_bytes": 8 << 20}
SMALL_KEPT = {"threads": 1, "descriptors": 2}
SLOWEST_COLLECTION_S = 5.0
"""Of the garbage of an aborted group; with torch's own settings its watchdog holds it for 60 s."""
STALL_S, SMALL_STALL_S = 8.0, 1.0
ABORTED_AT_S, SMALL_ABORTED_AT_S = 1.0, 0.3
TICK_S = 0.01


def run(report: Report, settings: Settings) -> None:
    cycles = SMALL_CYCLES if settings.small else CYCLES
    use_nccl_like_device(settings)
    run_as_training_thread(partial(_make_and_abort, report, settings, cycles))
    run_as_training_thread(partial(_abort_host_read, report, settings, cycles + 1))


def _make_and_abort(report: Report, settings: Settings, cycles: int) -> None:
    seconds: dict[str, list[float]] = {"join": [], "sum": [], "abort": [], "collect": []}
    counts = []
    for cycle in range(1, cycles + 1):
        member = make_member(settings, cycle)
        sums: list[float] = []
        _timed(seconds["join"], member.join)
        _timed(seconds["sum"], partial(_append_sum, sums, member.device))
        if sums != [1.0]:
            report.check(f"sum of cycle {cycle}", False, sums, "[1.0]")
        _timed(seconds["abort"], member.abort)
        del member
        _timed(seconds["collect"], gc.collect)
        counts.append(count_resources(settings))
        report.value("cycles", cycle)
    for name, values in seconds.items():
        report.value(
            f"{name}_s", {"first": values[0], "median": median(values), "max": max(values)}
        )
    report.value("after each cycle", {name: [c[name] for c in counts] for name in counts[0]})
    kept = SMALL_KEPT if settings.small else KEPT
    for name, before in counts[SETTLED - 1].items():
        grown = counts[-1][name] - before
        allowed = kept.get(name, 0) * (cycles - SETTLED) + 2
        report.check(
            f"{name} kept by {cycles - SETTLED} cycles", grown <= allowed, grown, f"<= {allowed}"
        )
    slowest = max(seconds["collect"])
    passed = slowest < SLOWEST_COLLECTION_S
    report.check(
        "garbage of an old group", passed, f"{slowest:.2f} s", f"< {SLOWEST_COLLECTION_S} s"
    )


def _append_sum(sums: list[float], device: torch.device) -> None:
    sums.append(sum_of_ranks(device))


def _timed(seconds: list[float], action: Callable[[], object]) -> None:
    started_s = monotonic()
    action()
    seconds.append(monotonic() - started_s)


def _abort_host_read(report: Report, settings: Settings, generation: int) -> None:
    """The host reads a sum that waits behind a kernel; another thread aborts the group; then both
    threads have aborted it, as in a repair."""
    member = make_member(settings, generation)
    member.join()
    sum_of_ranks(member.device)
    watch = _Watch()
    aborted_at_s = SMALL_ABORTED_AT_S if settings.small else ABORTED_AT_S
    started_s = monotonic()
    arguments = member, watch, aborted_at_s
    thread = threading.Thread(target=_interrupt_later, args=arguments, daemon=True)
    thread.start()
    try:
        total = torch.ones(8, device=member.device)
        stall(settings, SMALL_STALL_S if settings.small else STALL_S)
        dist.all_reduce(total)
        watch.seen["read"] = str(total.tolist())
    except Exception as error:  # noqa: BLE001  what it raises is the finding
        watch.seen["read"] = f"{type(error).__name__}: {error}"[:300]
    watch.seconds["read"] = monotonic() - started_s
    thread.join(STALL_S)
    try:
        member.abort()
        watch.seen["second abort"] = "no error"
    except Exception as error:  # noqa: BLE001  it must raise nothing
        watch.seen["second abort"] = f"{type(error).__name__}: {error}"[:300]
    watch.seconds["both"] = monotonic() - started_s
    for name, text in watch.seen.items():
        report.value(f"abort behind a read: {name}", text)
    report.value("abort behind a read_s", watch.seconds)
    for name in ("interrupt", "second abort"):
        text = watch.seen.get(name, "it has not returned")
        report.check(f"abort behind a read: {name}", text == "no error", text, "no error")
    expected = aborted_at_s / TICK_S / 4
    report.check(
        "other threads run while the host reads",
        watch.ticks > expected,
        watch.ticks,
        f"> {expected}",
    )
    health: list[float] = []
    _timed(health, lambda: get_device(member.device).check_health(2 * STALL_S))
    report.value("health check after that_s", health[0])
    again = make_member(settings, generation + 1)
    again.join()
    report.check("a group after that", sum_of_ranks(again.device) == 1.0, "joined", "joined")
    again.abort()


class _Watch:
    """What the two threads see. Written by one thread at a time."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.ticks = 0


def _interrupt_later(member: Member, watch: _Watch, after_s: float) -> None:
    until_s = monotonic() + after_s
    while monotonic() < until_s:
        sleep(TICK_S)
        watch.ticks += 1
    started_s = monotonic()
    try:
        member.interrupt()
        watch.seen["interrupt"] = "no error"
    except Exception as error:  # noqa: BLE001  it must raise nothing
        watch.seen["interrupt"] = f"{type(error).__name__}: {error}"[:300]
    watch.seconds["interrupt"] = monotonic() - started_s

"""CPU and GPU use of a rank, between two steps."""

from __future__ import annotations

import os
from time import monotonic

import pytest

from rayzero.workers.step_report import GPU_INTERVAL_S, UsageMeter


def test_cpu_cores_are_those_of_the_step() -> None:
    """The oracle is the kernel's count of this process's ticks."""
    meter = UsageMeter()
    started_s, before = monotonic(), sum(os.times()[:2])
    meter.restart()
    while monotonic() - started_s < 0.3:
        pass
    cores = meter.end_step()["cpu_cores"]
    used = (sum(os.times()[:2]) - before) / (monotonic() - started_s)
    assert cores == pytest.approx(used, abs=0.15)  # a tick is 10 ms


def test_driver_is_asked_once_a_second() -> None:
    now_s, asked = 100.0, 0

    def read() -> float:
        nonlocal asked
        asked += 1
        return asked / 10

    meter = UsageMeter(lambda: now_s, lambda: 2 * now_s, read)
    shares = []
    for _ in range(8):
        now_s += GPU_INTERVAL_S / 4
        shares.append(meter.end_step())
    assert [gauges["gpu_utilization"] for gauges in shares] == [0.1] * 4 + [0.2] * 4
    assert {gauges["cpu_cores"] for gauges in shares} == {2.0}


def test_unknown_use_is_not_reported() -> None:
    meter = UsageMeter(lambda: 1.0, lambda: 1.0, lambda: None)
    assert meter.end_step() == {}

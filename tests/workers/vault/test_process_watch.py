"""What /proc shows of a process that is stopped, waits, spins, or is held in native code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rayzero.workers.vault.process_watch import STALLED_S, ProcessWatch
from rayzero.workers.vault.records import ProcessStalled

SPIN, WAIT = "while True: pass", "import ctypes; ctypes.PyDLL(None).pause()"
LIMIT_S = 60.0


@pytest.fixture
def start() -> Iterator[Callable[[str], int]]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str) -> int:
        started.append(subprocess.Popen([sys.executable, "-c", code]))
        return started[-1].pid

    yield begin
    for process in started:
        process.kill()
        process.wait()


def wait_for_report(watch: ProcessWatch, pid: int, clock: list[float]) -> str:
    """The next state that is reported: a clock that is 4 times as fast as the process's."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        time.sleep(0.2)
        clock[0] += 0.8
        for event in watch.look([(5, pid)]):
            assert event == ProcessStalled(5, pid, event.state)
            return event.state
    raise TimeoutError


def test_stopped_and_blocked_processes_are_told_from_those_that_run(start: Callable[[str], int]):
    clock = [0.0]
    watch = ProcessWatch(clock=lambda: clock[0])
    spinning, blocked = start(SPIN), start(WAIT)
    for _ in range(10):
        clock[0] += 1.0
        time.sleep(0.1)
        assert watch.look([(5, spinning)]) == []
    os.kill(spinning, signal.SIGSTOP)
    stopped_s = clock[0]
    assert wait_for_report(watch, spinning, clock) == "T"
    assert STALLED_S <= clock[0] - stopped_s < STALLED_S + 2
    os.kill(spinning, signal.SIGCONT)
    assert wait_for_report(watch, spinning, clock) == ""
    assert wait_for_report(watch, blocked, clock) == "S"


def write_stat(proc: Path, state: str, ticks: int, thread: str = "S") -> None:
    for folder, letter in ((proc / "7", state), (proc / "7/task/8", thread)):
        folder.mkdir(parents=True, exist_ok=True)
        fields = [letter, *["0"] * 10, str(ticks), "0", *["0"] * 20]
        (folder / "stat").write_text(f"7 (a (b) c) {' '.join(fields)}")


@pytest.mark.parametrize(
    ("state", "ticks_per_s", "thread", "pause_s", "reported"),
    [
        ("S", 0, "S", 1.0, ["S"]),
        ("D", 5, "S", 1.0, ["D"]),  # threads that only answer
        ("S", 20, "S", 1.0, []),
        ("R", 0, "R", 1.0, []),  # it gets no CPU
        ("S", 0, "R", 1.0, []),  # nor does its training thread
        ("S", 0, "S", 4.0, []),  # the vault did not run either
        ("t", 90, "S", 1.0, ["t"]),
    ],
)
def test_what_counts_as_stalled(
    tmp_path: Path,
    state: str,
    ticks_per_s: int,
    thread: str,
    pause_s: float,
    reported: list[str],
):
    now = [0.0]
    watch = ProcessWatch(tmp_path, lambda: now[0])
    seen: list[str] = []
    per_s = os.sysconf("SC_CLK_TCK") // 100
    for second in range(8):
        write_stat(tmp_path, state, int(ticks_per_s * per_s * now[0]), thread)
        seen += [it.state for it in watch.look([(0, 7), (1, 9)])]
        now[0] += pause_s
        del second
    assert seen == reported

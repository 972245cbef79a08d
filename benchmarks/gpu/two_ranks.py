"""Stage: two ranks; one is killed while the other reads a sum; a third takes its place.

On one GPU this needs NCCL 2.30 or newer. Without a GPU it runs on the tests' NCCL-like device.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from functools import partial
from time import monotonic, sleep

import torch

from benchmarks.gpu.report import Report, Settings, StageSkippedError
from benchmarks.gpu.rows import unsupported_reason
from benchmarks.gpu.worker_groups import (
    Member,
    make_member,
    run_as_training_thread,
    sum_of_ranks,
    use_nccl_like_device,
)
from rayzero.engine.device import get_device
from rayzero.workers.process_group import polled_group_errors

SUMS = 50
KILLED_AT_S, NOTICED_S = 0.5, 2.0  # the group's error is polled every second
LIVES_S = 5.0
"""How long the survivor trains on: a watchdog that it has forgotten would end it."""
HEALTH_S = 20.0
EXPECTED = 3.0  # 1 + 2


def run(report: Report, settings: Settings) -> None:
    if settings.on_gpu:
        nccl = torch.cuda.nccl.version()[:3]
        reason = unsupported_reason(2, torch.cuda.device_count(), nccl)
        if reason:
            raise StageSkippedError(reason)
        if torch.cuda.device_count() < 2:
            os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_NVLS_ENABLE="0")
    use_nccl_like_device(settings)
    run_as_training_thread(partial(_lose_a_peer, report, settings))
    run_as_training_thread(partial(_go_on_with_another, report, settings))


def _lose_a_peer(report: Report, settings: Settings) -> None:
    member = make_member(settings, 1, rank=0, world_size=2)
    peer = _start_peer(settings, member.assignment.store_port, 1)
    try:
        started_s = monotonic()
        member.join()
        report.value("join_s", monotonic() - started_s)
        sums = [sum_of_ranks(member.device) for _ in range(SUMS)]
        report.check("sums of two ranks", set(sums) == {EXPECTED}, set(sums), str({EXPECTED}))
        killer = threading.Thread(target=_kill_and_fence, args=(peer, member, report), daemon=True)
        with polled_group_errors(member.device, lambda text: report.value("polled error", text)):
            killer.start()
            _read_sums_until_aborted(report, member.device)
            killer.join()
        started_s = monotonic()
        member.abort()
        report.value("second abort_s", monotonic() - started_s)
        started_s = monotonic()
        get_device(member.device).check_health(HEALTH_S)
        report.value("health check_s", monotonic() - started_s)
    finally:
        peer.kill()
        peer.wait()


def _go_on_with_another(report: Report, settings: Settings) -> None:
    member = make_member(settings, 2, rank=0, world_size=2)
    other = _start_peer(settings, member.assignment.store_port, 2)
    try:
        started_s = monotonic()
        member.join()
        report.value("join after the fault_s", monotonic() - started_s)
        until_s = monotonic() + (LIVES_S if settings.on_gpu else 0.2)
        sums = {sum_of_ranks(member.device)}
        while monotonic() < until_s:
            sums.add(sum_of_ranks(member.device))
        report.check("sums after the fault", sums == {EXPECTED}, sums, str({EXPECTED}))
        member.abort()
    finally:
        other.kill()
        other.wait()


def _read_sums_until_aborted(report: Report, device: torch.device) -> None:
    started_s = monotonic()
    read = EXPECTED
    try:
        while read == EXPECTED:
            read = sum_of_ranks(device)
        report.value("an aborted sum reads", read)
    except Exception as error:  # noqa: BLE001  what it raises is the finding
        report.value("an aborted sum raises", f"{type(error).__name__}: {error}"[:200])
    report.value("until the survivor was free_s", monotonic() - started_s)


def _kill_and_fence(peer: subprocess.Popen[bytes], member: Member, report: Report) -> None:
    sleep(KILLED_AT_S)
    peer.send_signal(signal.SIGKILL)
    sleep(NOTICED_S)
    started_s = monotonic()
    try:
        member.interrupt()
        report.value("abort_s", monotonic() - started_s)
    except Exception as error:  # noqa: BLE001  it must raise nothing
        report.check("abort", False, f"{type(error).__name__}: {error}"[:200], "no error")


def _start_peer(settings: Settings, port: int, generation: int) -> subprocess.Popen[bytes]:
    call = json.dumps([asdict(settings), port, generation])
    return subprocess.Popen([sys.executable, "-m", "benchmarks.gpu.two_ranks", call])


def serve(settings: Settings, port: int, generation: int) -> None:
    """The other rank: takes part in sums until it is killed."""
    use_nccl_like_device(settings)

    def take_part() -> None:
        member = make_member(settings, generation, rank=1, world_size=2, port=port)
        member.join()
        while True:
            sum_of_ranks(member.device)

    run_as_training_thread(take_part)


if __name__ == "__main__":
    fields, its_port, its_generation = json.loads(sys.argv[1])
    serve(Settings(**fields), its_port, its_generation)

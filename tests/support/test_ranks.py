"""Rank processes: results, errors, and recovery from ranks that die or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support import ranks
from tests.support.ranks import MAX_WORLD, RankError, run_ranks, stop_ranks


def sum_over_ranks(rank: int, world: int, scale: float) -> tuple[int, float]:
    value = torch.tensor([scale * (rank + 1)])
    dist.all_reduce(value)
    return rank, value.item()


def has_group(rank: int, world: int) -> tuple[int, int, bool]:
    return rank, world, dist.is_initialized()


def draw(rank: int, world: int) -> float:
    torch.set_default_dtype(torch.float64)  # must not affect the next call
    return torch.rand(()).item()


def raise_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError("a bad thing")
    dist.barrier()


def die_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank: int, world: int, culprit: int) -> int:
    if rank == culprit:
        time.sleep(600)
    return rank


def get_pid(rank: int, world: int) -> int:
    return os.getpid()


def return_lambda(rank: int, world: int) -> object:
    return lambda: None


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_are_in_rank_order(world: int) -> None:
    expected = sum(2.0 * (rank + 1) for rank in range(world))
    assert run_ranks(world, sum_over_ranks, 2.0) == [(rank, expected) for rank in range(world)]


def test_world_zero_has_no_process_group() -> None:
    assert run_ranks(0, has_group) == [(0, 0, False)]


def test_processes_are_reused_with_the_same_initial_state() -> None:
    stop_ranks()
    pids = run_ranks(2, get_pid)
    first = run_ranks(2, draw)
    assert run_ranks(2, draw) == first
    assert run_ranks(3, get_pid)[:2] == pids
    assert run_ranks(1, get_pid) == pids[:1]


def test_processes_are_replaced_after_max_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_ranks()
    monkeypatch.setattr(ranks, "MAX_CALLS", 2)
    first = run_ranks(1, get_pid)
    assert run_ranks(2, get_pid)[:1] == first
    assert run_ranks(1, get_pid) != first
    stop_ranks()


def test_error_contains_rank_and_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: Traceback.*raise_on.*a bad thing") as caught:
        run_ranks(2, raise_on, 1)
    assert caught.value.rank == 1
    assert run_ranks(2, has_group) == [(0, 2, True), (1, 2, True)]


def test_unpicklable_result_is_an_error() -> None:
    with pytest.raises(RankError, match="lambda"):
        run_ranks(1, return_lambda)


def test_pool_recovers_from_killed_rank() -> None:
    with pytest.raises(RankError, match="rank 1: the process died"):
        run_ranks(2, die_on, 1)
    assert len(run_ranks(2, get_pid)) == 2


def test_rank_killed_between_calls_is_reported() -> None:
    os.kill(run_ranks(2, get_pid)[1], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1: the process died"):
        run_ranks(2, sum_over_ranks, 1.0)


def test_hanging_rank_times_out_and_is_killed() -> None:
    hung = run_ranks(2, get_pid)
    # on a busy machine the other rank may be late as well
    with pytest.raises(RankError, match=r"ranks \[(0, )?1\] did not finish in 3 s"):
        run_ranks(2, hang_on, 1, timeout_s=3)
    assert not any(psutil.pid_exists(pid) for pid in hung)
    assert run_ranks(2, hang_on, -1) == [0, 1]


@pytest.mark.parametrize("world", [-1, MAX_WORLD + 1])
def test_world_out_of_range_is_rejected(world: int) -> None:
    with pytest.raises(ValueError, match="allowed: 0 to 4"):
        run_ranks(world, get_pid)


@pytest.mark.slow
def test_ranks_exit_with_their_parent() -> None:
    script = (
        "import os, signal\n"
        "from tests.support import ranks, test_ranks\n"
        "print(ranks.run_ranks(1, test_ranks.get_pid)[0], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    orphan = int(done.stdout)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(orphan) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(orphan)

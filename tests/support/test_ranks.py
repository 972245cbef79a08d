"""Rank processes: their results, and that a rank that fails, dies or hangs fails the call."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, run_ranks, stop_ranks


def draw_and_sum(rank: int, world: int, scale: float) -> tuple[int, float, float]:
    value = torch.tensor([scale * (rank + 1)])
    if world:
        dist.all_reduce(value)
    torch.set_default_dtype(torch.float64)  # must not affect the next call
    return rank, value.item(), torch.rand(()).item()


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
    return os.getpid()


def return_lambda(rank: int, world: int) -> object:
    return lambda: None


@pytest.mark.parametrize("world", [0, 1, 3])
def test_results_are_in_rank_order_and_repeatable(world: int) -> None:
    stop_ranks()
    results = run_ranks(world, draw_and_sum, 2.0)
    size = max(world, 1)
    expected = sum(2.0 * (rank + 1) for rank in range(size))
    assert [result[:2] for result in results] == [(rank, expected) for rank in range(size)]
    assert run_ranks(world, draw_and_sum, 2.0) == results


def test_error_contains_rank_and_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: Traceback.*raise_on.*a bad thing") as caught:
        run_ranks(2, raise_on, 1)
    assert caught.value.rank == 1
    with pytest.raises(RankError, match="lambda"):
        run_ranks(1, return_lambda)


def test_killed_rank_is_reported() -> None:
    with pytest.raises(RankError, match="rank 1: the process died"):
        run_ranks(2, die_on, 1)
    os.kill(run_ranks(2, hang_on, -1)[1], signal.SIGKILL)  # between two calls
    with pytest.raises(RankError, match="rank 1: the process died"):
        run_ranks(2, draw_and_sum, 1.0)


def test_hanging_rank_times_out_and_is_killed() -> None:
    hung = run_ranks(2, hang_on, -1)
    # on a busy machine the other rank may be late as well
    with pytest.raises(RankError, match=r"ranks \[(0, )?1\] did not finish in 2 s"):
        run_ranks(2, hang_on, 1, timeout_s=2)
    assert not any(psutil.pid_exists(pid) for pid in hung)

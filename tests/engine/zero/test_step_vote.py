"""The step vote: norm, finiteness and loss in a small all-reduce."""

from __future__ import annotations

from math import inf, isnan, nan

import pytest
import torch
from torch import Tensor, nn

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.comm.process_group import SingleRankBackend, connect_collectives
from rayzero.engine.zero.step_vote import StepVote, vote_on_step
from tests.support.ranks import run_ranks


def vote_on_one_rank(parts: list[Tensor], loss: float = 0.0, factor: float = 1.0) -> StepVote:
    return vote_on_step(parts, torch.tensor(loss), factor, Collectives(SingleRankBackend()))


def test_norm_is_over_all_parts_and_scaled() -> None:
    vote = vote_on_one_rank([torch.tensor([3.0]), torch.tensor([0.0, 4.0])], 1.5, factor=0.5)
    assert vote == StepVote(grad_norm=2.5, loss=1.5)
    assert vote.finite


def test_parts_of_several_dtypes() -> None:
    parts = [torch.tensor([3.0]), torch.tensor([4.0]).double(), torch.tensor([12.0]).bfloat16()]
    assert vote_on_one_rank(parts).grad_norm == pytest.approx(13)


def test_norm_of_fp16_parts_may_exceed_fp16() -> None:
    parts = [torch.full((100,), 6e4).half(), torch.full((2,), 1.0)]
    assert vote_on_one_rank(parts).grad_norm == pytest.approx(6e5, rel=1e-3)
    assert not vote_on_one_rank([torch.tensor([inf]).half()]).finite


def test_no_gradients_at_all() -> None:
    assert vote_on_one_rank([]) == StepVote(0.0, 0.0)


@pytest.mark.parametrize("bad", [inf, -inf, nan])
def test_single_non_finite_value_is_detected(bad: float) -> None:
    vote = vote_on_one_rank([torch.ones(5), torch.tensor([0.0, bad])])
    assert not vote.finite


def test_nan_loss_does_not_skip_the_step() -> None:
    vote = vote_on_one_rank([torch.ones(1)], nan)
    assert isnan(vote.loss)
    assert vote.finite


@pytest.mark.parametrize("max_norm", [0.1, 5.0, 100.0])
def test_clipping_equals_torch(max_norm: float) -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    vote = vote_on_one_rank([param.grad.clone()])
    clipped = param.grad * vote.clip_factor(max_norm)
    nn.utils.clip_grad_norm_([param], max_norm)
    assert torch.allclose(clipped, param.grad)


def test_no_clipping() -> None:
    assert StepVote(grad_norm=1e9, loss=0.0).clip_factor(0.0) == 1.0


def vote_twice(rank: int, world: int) -> tuple[list[StepVote], dict[str, int]]:
    collectives, _ = connect_collectives()
    good = vote_on_step([torch.full((4,), rank + 1.0)], torch.tensor(0.5), 1.0, collectives)
    # Only one rank's gradient overflows.
    bad = vote_on_step(
        [torch.tensor([inf if rank == 1 else 1.0])], torch.tensor(0.5), 1.0, collectives
    )
    return [good, bad], vars(collectives.counters.by_name["vote"])


def test_ranks_agree_in_a_single_collective() -> None:
    results = run_ranks(3, vote_twice)
    assert all(result == results[0] for result in results)
    (good, bad), traffic = results[0]
    assert good == StepVote(grad_norm=pytest.approx((4 * (1 + 4 + 9)) ** 0.5), loss=1.5)
    assert bad.loss == 1.5
    assert not bad.finite
    assert traffic == {"calls": 2, "bytes": 2 * 48}

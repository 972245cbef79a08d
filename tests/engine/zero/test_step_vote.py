"""The step vote: norm, finiteness and loss in a small all-reduce."""

from __future__ import annotations

from math import inf, isfinite, nan

import pytest
import torch
from torch import Tensor, nn

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.comm.process_group import SingleRankBackend, connect_collectives
from rayzero.engine.zero.step_vote import StepVote, vote_on_step
from tests.support.ranks import run_ranks


def vote_on_one_rank(parts: list[Tensor], loss: float = 0.0, factor: float = 1.0) -> StepVote:
    return vote_on_step(parts, torch.tensor(loss), factor, Collectives(SingleRankBackend()))


@pytest.mark.parametrize(
    ("parts", "norm"),
    [
        ([], 0.0),
        ([torch.tensor([3.0]), torch.tensor([0.0, 4.0])], 5.0),
        ([torch.tensor([3.0]), torch.tensor([4.0]).double(), torch.tensor([12.0]).bfloat16()], 13),
        ([torch.full((100,), 6e4).half(), torch.full((2,), 1.0)], 6e5),  # more than fp16 has
        ([torch.tensor([inf]).half()], inf),
        ([torch.ones(5), torch.tensor([0.0, -inf])], inf),
        ([torch.ones(5), torch.tensor([0.0, nan])], nan),
    ],
)
def test_norm_is_over_all_parts_and_scaled(parts: list[Tensor], norm: float) -> None:
    vote = vote_on_one_rank(parts, 1.5, factor=0.5)
    assert vote.grad_norm == pytest.approx(norm / 2, rel=1e-3, nan_ok=True)
    assert vote.loss == 1.5
    assert vote.finite is isfinite(norm)


def test_nan_loss_does_not_skip_the_step() -> None:
    assert vote_on_one_rank([torch.ones(1)], nan).finite


@pytest.mark.parametrize("max_norm", [0.1, 5.0, 100.0])
def test_clipping_equals_torch(max_norm: float) -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    vote = vote_on_one_rank([param.grad.clone()])
    clipped = param.grad * vote.clip_factor(max_norm)
    nn.utils.clip_grad_norm_([param], max_norm)
    assert torch.allclose(clipped, param.grad)
    assert vote.clip_factor(0.0) == 1.0


def vote_twice(rank: int, world: int) -> tuple[list[StepVote], dict[str, int]]:
    collectives = connect_collectives()
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
    assert traffic == {"calls": 2, "bytes": 2 * 80}

"""An engine that is dropped leaves messages under way; its group goes on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rayzero
from rayzero.engine.comm.backend import rank_chunk
from rayzero.engine.comm.gloo import GlooBackend
from rayzero.engine.comm.gloo_p2p import p2p_channel
from tests.support.ranks import run_ranks

LIMIT_S = 60.0


def the_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def in_turn(rank: int, *, first: Callable[[], None], then: Callable[[], None]) -> None:
    """Rank 1 does `first`, and only then rank 0 does `then`; told through the store, which is no
    message of the group's."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        first()
        store.set("first", "done")
    else:
        store.wait(["first"])
        then()


def one_is_dropped(rank: int, world: int, share: bool) -> tuple[float, int]:
    """Rank 1 drops its backend before rank 0's messages to it are sent."""
    made = [GlooBackend(the_group(), share_memory=share)]
    full = made[0].zeros(4 * world, torch.float32, torch.device("cpu"))
    launched = [made[0].all_gather(full, rank_chunk(full, rank, world))] if rank == 1 else []

    def first() -> None:
        launched.clear()
        made.clear()
        gc.collect()

    def then() -> None:
        other = made[0].all_gather(full, rank_chunk(full, rank, world))
        if not share:  # where memory is shared, a peer that is gone cannot be read
            other.wait()

    in_turn(rank, first=first, then=then)
    mail = p2p_channel(the_group())
    left = len(mail.in_flight)
    value = torch.tensor(float(rank))
    dist.all_reduce(value)
    again = GlooBackend(the_group(), share_memory=share)
    # Where memory is shared, rank 1 has never said that it has read rank 0's part.
    assert len(mail.in_flight) == (left if share else 0)
    full = again.zeros(4 * world, torch.float32, torch.device("cpu"))
    rank_chunk(full, rank, world).fill_(rank + 1)
    again.all_gather(full, rank_chunk(full, rank, world)).wait()
    return value.item() + full.sum().item(), left


@pytest.mark.parametrize("share", [True, False], ids=["shared", "messages"])
def test_a_group_goes_on_when_what_was_to_receive_is_gone(share: bool) -> None:
    found = run_ranks(2, one_is_dropped, share, timeout_s=LIMIT_S)
    assert [total for total, _ in found] == [1.0 + 4 * 3] * 2
    assert found[1][1] > 0, "rank 1 did leave messages under way"


def trained(rank: int, world: int, stage: int) -> list[int]:
    left = []
    for _ in range(20):
        model = nn.Linear(4, 2)
        config: dict[str, Any] = {
            "train_batch_size": world,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "zero_optimization": {"stage": stage},
        }
        engine, *_ = rayzero.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        del engine, model
        gc.collect()
        left.append(len(p2p_channel(the_group()).in_flight))
    return left


@pytest.mark.parametrize("stage", [1, 3])
def test_one_engine_after_another_in_one_group(stage: int) -> None:
    """None of them is closed. Each takes in what the one before has left."""
    for left in run_ranks(2, trained, stage, timeout_s=LIMIT_S):
        assert max(left) <= 8, left


def both(rank: int, world: int) -> float:
    """An engine is made while another's exchanges are done but not yet known to be read by all."""
    ways = [GlooBackend(the_group())]
    full = ways[0].zeros(4 * world, torch.float32, torch.device("cpu"))
    rank_chunk(full, rank, world).fill_(rank + 1)
    first = ways[0].all_gather(full, rank_chunk(full, rank, world))
    first.wait()
    ways.append(GlooBackend(the_group()))
    assert not p2p_channel(the_group()).in_flight
    first.release()  # waits for nothing twice
    ways[0].all_gather(full, rank_chunk(full, rank, world)).release()
    return full.sum().item()


def test_two_engines_of_one_group_at_once() -> None:
    assert run_ranks(2, both, timeout_s=LIMIT_S) == [4.0 * 3] * 2


def numbered(rank: int, world: int) -> tuple[int, int]:
    first = GlooBackend(the_group(), share_memory=False)
    second = GlooBackend(the_group(), share_memory=False)
    return first.next_tag(), second.next_tag()


def test_two_engines_of_one_group_number_their_collectives_together() -> None:
    assert run_ranks(2, numbered) == [(1, 2)] * 2

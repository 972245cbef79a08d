"""A worker's default group: what torch and a training function see of it, before the group of a
generation exists, when that has ended, and on a rank without peers.

Real groups of one rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from threading import Event, Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from rayzero.engine.comm.elastic_group import (
    CallHost,
    GroupPlace,
    calls_of,
    elastic_group,
    make_elastic_group,
)
from rayzero.engine.comm.process_group import connect_collectives, one_rank_group
from rayzero.engine.errors import CollectiveError
from rayzero.engine.torch_private import HashStore

CPU = torch.device("cpu")


class Host(CallHost):
    """Of a function whose collectives complete on this rank alone for `reason`."""

    def __init__(
        self, reason: str = "", *, records: bool = False, requires_peers: bool = False
    ) -> None:
        self.reason = reason
        self.recorded: list[tuple[str, list[Tensor]]] = []
        self.replayed: list[list[Tensor]] = []
        self.failures: list[Exception] = []
        self._records = records
        self._requires_peers = requires_peers

    def local_reason(self) -> str:
        return self.reason

    def replays(self, name: str, outputs: Sequence[Tensor]) -> bool:
        if not self.replayed:
            return False
        for output, tensor in zip(outputs, self.replayed.pop(0), strict=True):
            output.copy_(tensor)
        return True

    def records(self) -> bool:
        return self._records

    def record(self, name: str, outputs: Sequence[Tensor]) -> None:
        self.recorded.append((name, [output.clone() for output in outputs]))

    def requires_peers(self, outputs: Sequence[Tensor]) -> bool:
        return self._requires_peers and bool(outputs)

    def outlives(self, error: Exception) -> bool:
        self.failures.append(error)
        self.reason = "its group is broken"
        return True


Begin = Callable[[], None]
Plan = Callable[..., None]


@pytest.fixture
def plan() -> Iterator[Plan]:
    """Plans a generation; `forms` makes its group, of this rank alone."""

    def plan(
        world_size: int = 1, rank: int = 0, begin: Begin | None = None, *, forms: bool = False
    ) -> None:
        make_elastic_group().plan(GroupPlace(rank, world_size, CPU, "gloo"), begin)
        if forms:
            form()

    yield plan
    make_elastic_group().abort_groups()
    dist.destroy_process_group()


def form() -> None:
    make_elastic_group().form_group(HashStore(), backend="gloo")


KNOWN: dict[str, Callable[[], Any]] = {
    "is_initialized": dist.is_initialized,
    "WORLD": lambda: dist.group.WORLD is elastic_group() is not None,
    "class": lambda: isinstance(dist.group.WORLD, dist.ProcessGroup),
    "rank": lambda: (dist.get_rank(), dist.get_world_size()) == (0, 3),
    "ranks": lambda: dist.get_process_group_ranks(dist.group.WORLD) == [0, 1, 2],
    "get_backend": lambda: dist.get_backend() == "gloo",
    "device": lambda: c10d._get_object_coll_device() == "cpu",
}
NEED_THE_GROUP: dict[str, Callable[[], Any]] = {
    "barrier": lambda: dist.barrier() is None,
    "new_group": lambda: dist.new_group([0]) is not None,
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)) is None,
    "asynchronous": lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_begins_no_generation(plan: Plan, name: str):
    plan(3, begin=lambda: pytest.fail("it was begun"))
    assert KNOWN[name]()


@pytest.mark.parametrize("name", NEED_THE_GROUP)
def test_collectives_begin_the_generation(plan: Plan, name: str):
    """The generation may begin with other ranks than were planned."""
    begun: list[int] = []

    def begin() -> None:
        begun.append(1)
        plan(forms=True)

    plan(3, begin=begin)
    assert NEED_THE_GROUP[name]()
    assert NEED_THE_GROUP[name]()
    assert begun == [1]


def test_engine_begins_the_generation(plan: Plan):
    def begin() -> None:
        raise dist.DistNetworkError("the peer has left")

    plan(2, begin=begin)
    with pytest.raises(dist.DistNetworkError, match="the peer has left"):
        connect_collectives()


def test_one_rank_needs_no_group(plan: Plan):
    plan(1, begin=lambda: pytest.fail("it was begun"))
    assert connect_collectives().world_size == 1


def test_group_of_one_rank_is_made_once_a_generation(plan: Plan):
    plan(forms=True)
    first = one_rank_group()
    assert one_rank_group() is first
    make_elastic_group().abort_groups()
    plan(forms=True)
    assert one_rank_group() is not first


def test_aborted_group_ends_on_a_thread_before_the_next_one_forms(plan: Plan):
    """Its destructor takes gloo 10 ms, which no survivor of a fault waits for."""
    ended, may_end, formed = Event(), Event(), Event()
    plan(forms=True)

    def end() -> None:
        ended.set()
        assert may_end.wait(30)

    weakref.finalize(make_elastic_group().get_group(), end)
    make_elastic_group().abort_groups()
    assert ended.wait(30), "the thread has dropped the last reference"
    plan()
    forming = Thread(target=lambda: (form(), formed.set()))
    forming.start()
    assert not formed.wait(0.1)
    may_end.set()
    assert formed.wait(30)
    forming.join()


def test_what_is_kept_of_torch_stays_valid(plan: Plan):
    """Another generation, with a group of its own; torch knows no other."""
    world = None
    for _ in range(3):
        plan(forms=True)
        world = world or dist.group.WORLD
        assert dist.group.WORLD is world
        total = torch.full((2,), 3.0)
        dist.all_reduce(total, group=world)
        assert total.tolist() == [3.0, 3.0]
        subgroup = dist.new_group([0])
        dist.barrier(subgroup)
        make_elastic_group().abort_groups()
        assert list(c10d._world.pg_map) == [world]
        assert list(c10d._world.pg_names) == [world]
        with pytest.raises(dist.DistError, match="aborted"):
            dist.all_reduce(total, group=world)


def test_torch_trains_by_it(plan: Plan):
    """DistributedDataParallel and functional collectives call it from C++."""
    plan(forms=True)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert model.module.weight.grad is not None
    gathered = [None]
    dist.all_gather_object(gathered, {"a": 1})
    assert gathered == [{"a": 1}]


def test_failure_of_a_call_is_the_hosts(plan: Plan):
    plan(2)
    host, total = Host(), torch.full((2,), 3.0)
    with calls_of(host):
        dist.all_reduce(total)
        dist.barrier()
    assert total.tolist() == [3.0, 3.0]
    assert [str(error) for error in host.failures] == ["the process group was aborted"]


def own(rank: int, length: int = 2) -> Tensor:
    return torch.arange(float(length)) + 10 * rank


def gathered_into(part: Tensor) -> Tensor:
    output = torch.zeros(3 * len(part))
    dist.all_gather_into_tensor(output, part)
    return output


def gathered(part: Tensor) -> Tensor:
    outputs = [torch.zeros_like(part) for _ in range(3)]
    dist.all_gather(outputs, part)
    return torch.cat(outputs)


def scattered(full: Tensor) -> Tensor:
    output = torch.zeros(2)
    dist.reduce_scatter_tensor(output, full)
    return output


def exchanged(full: Tensor) -> Tensor:
    output = torch.zeros(6)
    dist.all_to_all_single(output, full)
    return output


def broadcast(tensor: Tensor) -> Tensor:
    dist.broadcast(tensor, 0)
    return tensor


def reduced(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor


ALONE: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "all_reduce": (reduced, [10, 11, 12, 13, 14, 15]),
    "broadcast": (broadcast, [10, 11, 12, 13, 14, 15]),
    "all_gather": (gathered, [10, 11, 12, 13, 14, 15] * 3),
    "all_gather_into_tensor": (gathered_into, [10, 11, 12, 13, 14, 15] * 3),
    "reduce_scatter": (scattered, [12, 13]),
    "all_to_all": (exchanged, [10, 11, 12, 13, 14, 15]),
}


@pytest.mark.parametrize("name", ALONE)
def test_call_completes_on_one_rank_alone(plan: Plan, name: str):
    plan(3, rank=1, begin=lambda: pytest.fail("it was begun"))
    call, expected = ALONE[name]
    with calls_of(Host("its group is broken")):
        assert call(own(1, 6)).tolist() == expected


def test_object_of_another_rank_cannot_be_made_up(plan: Plan):
    """torch reads what it has received as a length."""
    plan(3, rank=1)
    with calls_of(Host("its group is broken")):
        with pytest.raises(CollectiveError, match=r"an object of another rank.*broken"):
            dist.broadcast_object_list([None], 0)
        with pytest.raises(CollectiveError, match="new_group, while its group is broken"):
            dist.new_group([0, 1])
        objects = [None] * 3
        dist.all_gather_object(objects, "own")
    assert objects == ["own"] * 3


def test_call_that_requires_peers_raises_without_them(plan: Plan):
    plan(3, rank=1)
    host = Host("its group is broken", requires_peers=True)
    with calls_of(host):
        dist.barrier()
        with pytest.raises(CollectiveError, match="while its group is broken"):
            dist.all_reduce(torch.zeros(1))
        host.replayed = [[torch.ones(1)]]
        dist.all_reduce(total := torch.zeros(1))
    assert total.item() == 1, "what is known needs no peers"


def test_results_are_told_and_given_again(plan: Plan):
    plan(forms=True)
    first = Host(records=True)
    with calls_of(first):
        objects = [{"path": "/a"}]
        dist.broadcast_object_list(objects, 0)
        dist.barrier()
    assert [name for name, _ in first.recorded] == ["broadcast", "broadcast", "barrier"]
    plan(3, rank=1)
    second = Host("it has not begun its first step")
    second.replayed = [tensors for _, tensors in first.recorded]
    with calls_of(second):
        objects = [None]
        dist.broadcast_object_list(objects, 0)
    assert objects == [{"path": "/a"}]

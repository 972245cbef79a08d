"""A worker's default group: what torch and a training function see of it, while the group of a
generation joins, when that has ended, and on a rank without peers.

Real groups of one rank, where each test decides when a join goes on, and of two processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from rayzero.engine.comm.elastic_group import (
    ElasticGroup,
    calls_of,
    elastic_group,
    make_elastic_group,
)
from rayzero.engine.comm.function_calls import CallHost
from rayzero.engine.comm.joining_group import JoiningGroup
from rayzero.engine.comm.process_group import connect_collectives
from rayzero.engine.errors import CollectiveError

CPU = torch.device("cpu")
LIMIT_S = 30.0


class StoppedError(Exception):
    """As the interrupt of a generation."""


class Join:
    """A join that waits for `go_on`, or fails with `error`."""

    def __init__(self, error: Exception | None = None, world_size: int = 1) -> None:
        self.go_on = threading.Event()
        self.stopped = threading.Event()
        self.error = error
        self.group = JoiningGroup(self.run, 0, world_size, CPU, "gloo", self.check)

    def run(self) -> dist.ProcessGroup:
        assert self.go_on.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        assert self.group.world_size == 1, "nobody else joins"
        group: dist.ProcessGroup = make_elastic_group().form_group(HashStore(), backend="gloo")
        return group

    def check(self) -> None:
        if self.stopped.is_set():
            raise StoppedError


class Host(CallHost):
    """Of a function whose collectives complete on this rank alone for `reason`."""

    def __init__(self, reason: str = "", *, records: bool = False) -> None:
        self.reason = reason
        self.recorded: list[tuple[str, list[Tensor]]] = []
        self.replayed: list[list[Tensor]] = []
        self.failures: list[Exception] = []
        self._records = records

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

    def outlives(self, error: Exception) -> bool:
        self.failures.append(error)
        self.reason = "its group is broken"
        return True


@pytest.fixture
def make_join() -> Iterator[Callable[..., Join]]:
    joins: list[Join] = []

    def make(*args: Any, **kwargs: Any) -> Join:
        joins.append(Join(*args, **kwargs))
        make_elastic_group().begin(joins[-1].group)
        return joins[-1]

    yield make
    for join in joins:
        join.group.end(join.go_on.set)
    make_elastic_group().abort_groups()
    dist.destroy_process_group()


def go_on_when_waited_for(join: Join, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets the join go on as soon as somebody waits for it. Returns who did: threads' names."""
    waiting: list[str] = []
    wait = join.group._ended.wait

    def wait_and_tell(timeout: float | None = None) -> bool:
        if join.group._ended.is_set():
            return True
        waiting.append(threading.current_thread().name)
        join.go_on.set()
        return wait(timeout)

    monkeypatch.setattr(join.group._ended, "wait", wait_and_tell)
    return waiting


KNOWN: dict[str, Callable[[], Any]] = {
    "is_initialized": dist.is_initialized,
    "WORLD": lambda: dist.group.WORLD is elastic_group() is not None,
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
def test_what_is_known_needs_no_wait(make_join, name: str):
    make_join(world_size=3)
    assert KNOWN[name]()


@pytest.mark.parametrize("name", NEED_THE_GROUP)
def test_collectives_wait_for_the_group(make_join, monkeypatch, name: str):
    waiting = go_on_when_waited_for(make_join(), monkeypatch)
    assert NEED_THE_GROUP[name]()
    assert set(waiting) == {threading.current_thread().name}


def test_another_thread_of_the_user_waits_too(make_join):
    join, answers = make_join(), []
    thread = threading.Thread(target=lambda: answers.append(dist.barrier()))
    join.stopped.set()  # that is for the training thread only
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    join.go_on.set()
    thread.join(LIMIT_S)
    assert answers == [None]


def test_wait_is_interrupted(make_join):
    join = make_join()
    threading.Timer(0.05, join.stopped.set).start()
    with pytest.raises(StoppedError):
        dist.barrier()
    assert join.group.is_joining, "the join goes on until it is ended"


def test_error_of_the_join_is_raised_where_the_group_is_needed(make_join):
    make_join(dist.DistNetworkError("the peer has left")).go_on.set()
    for call in (dist.barrier, lambda: dist.all_reduce(torch.ones(1))):
        with pytest.raises(dist.DistNetworkError, match="the peer has left"):
            call()


def test_interrupt_is_preferred_to_the_error_that_it_causes(make_join):
    join = make_join(dist.DistNetworkError("closed"))
    join.stopped.set()
    join.go_on.set()
    join.group._thread.join(LIMIT_S)
    with pytest.raises(StoppedError):
        join.group.wait()


def test_no_thread_joins_when_it_has_been_ended(make_join):
    """An interrupt may come before the wait that it is to end."""
    join, interrupts = make_join(dist.DistNetworkError("closed")), []

    def interrupt() -> None:
        interrupts.append(1)
        if len(interrupts) == 3:
            join.go_on.set()

    with pytest.raises(RuntimeError, match="still joining"):
        make_elastic_group().begin(Join().group)
    make_elastic_group().end_joining(interrupt)
    assert len(interrupts) >= 3
    assert not join.group.is_joining


def test_engine_waits_in_its_first_collective(make_join, monkeypatch):
    join = make_join(world_size=2)
    collectives, device = connect_collectives()
    assert (collectives.rank, collectives.world_size, device) == (0, 2, CPU)
    collectives.zeros(4, torch.float32, CPU)
    collectives.progress_pending()
    assert not join.go_on.is_set()
    join.error = dist.DistNetworkError("waited for")
    go_on_when_waited_for(join, monkeypatch)
    with pytest.raises(CollectiveError, match="waited for"):
        collectives.all_reduce(torch.ones(1)).wait()


def test_one_rank_never_waits(make_join):
    join = make_join()
    assert connect_collectives()[0].world_size == 1
    assert not join.go_on.is_set()


def test_what_is_kept_of_torch_stays_valid(make_join):
    """Another generation, with a group of its own; torch knows no other."""
    world = None
    for world_size in (1, 1, 1):
        join = make_join(world_size=world_size)
        join.go_on.set()
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


def test_torch_trains_by_it(make_join):
    """DistributedDataParallel and functional collectives call it from C++."""
    make_join().go_on.set()
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert model.module.weight.grad is not None
    gathered = [None]
    dist.all_gather_object(gathered, {"a": 1})
    assert gathered == [{"a": 1}]


def test_failure_of_a_call_is_the_hosts(make_join):
    join = make_join(world_size=2)
    join.error = dist.DistNetworkError("the peer has left")
    join.go_on.set()
    host, total = Host(), torch.full((2,), 3.0)
    with calls_of(host):
        dist.all_reduce(total)
        dist.barrier()
    assert total.tolist() == [3.0, 3.0]
    assert [str(error) for error in host.failures] == ["the peer has left"]


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
def test_call_completes_on_one_rank_alone(make_join, name: str):
    join = make_join(world_size=3)
    join.group.rank = 1
    call, expected = ALONE[name]
    with calls_of(Host("its group is broken")):
        assert call(own(1, 6)).tolist() == expected
    assert not join.go_on.is_set()


def test_object_of_another_rank_cannot_be_made_up(make_join):
    """torch reads what it has received as a length."""
    join = make_join(world_size=3)
    join.group.rank = 1
    with calls_of(Host("its group is broken")):
        with pytest.raises(CollectiveError, match=r"an object of another rank.*broken"):
            dist.broadcast_object_list([None], 0)
        with pytest.raises(CollectiveError, match="new_group, while its group is broken"):
            dist.new_group([0, 1])
        objects = [None] * 3
        dist.all_gather_object(objects, "own")
    assert objects == ["own"] * 3


def test_results_are_told_and_given_again(make_join):
    make_join().go_on.set()
    first = Host(records=True)
    with calls_of(first):
        objects = [{"path": "/a"}]
        dist.broadcast_object_list(objects, 0)
        dist.barrier()
    assert [name for name, _ in first.recorded] == ["broadcast", "broadcast", "barrier"]
    again = make_join(world_size=3)
    again.group.rank = 1
    second = Host("it has not begun its first step")
    second.replayed = [tensors for _, tensors in first.recorded]
    with calls_of(second):
        objects = [None]
        dist.broadcast_object_list(objects, 0)
    assert objects == [{"path": "/a"}]


def test_group_is_a_process_group_of_torch(make_join):
    make_join()
    assert isinstance(dist.group.WORLD, ElasticGroup)
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)

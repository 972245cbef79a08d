"""Everybody waits for a default group that a thread is joining, but for what needs no other rank.

A real group of one rank; each test decides when its join goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from rayzero.engine.comm import joining_group as module
from rayzero.engine.comm.joining_group import JoiningGroup, end_joining, joining_group
from rayzero.engine.comm.nccl import NcclBackend
from rayzero.engine.comm.process_group import connect_collectives

CPU = torch.device("cpu")
LIMIT_S = 30.0


class StoppedError(Exception):
    """As the interrupt of a generation."""


class Join:
    """A join that waits for `go_on`, or fails with `error`."""

    def __init__(self, error: Exception | None = None, backend: str = "gloo") -> None:
        self.go_on = threading.Event()
        self.stopped = threading.Event()
        self.error = error
        self.group = JoiningGroup(self.run, 0, 1, CPU, backend, self.check)

    def run(self) -> None:
        assert self.go_on.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        assert not dist.is_initialized(), "does not wait for itself"
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    def check(self) -> None:
        if self.stopped.is_set():
            raise StoppedError


@pytest.fixture
def make_join() -> Iterator[Callable[..., Join]]:
    joins: list[Join] = []

    def make(*args: Any, **kwargs: Any) -> Join:
        joins.append(Join(*args, **kwargs))
        joins[-1].group.start()
        return joins[-1]

    yield make
    end_joining(lambda: [join.go_on.set() for join in joins] and None)
    if dist.is_initialized():
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


ASKED: dict[str, Callable[[], Any]] = {
    "is_initialized": dist.is_initialized,
    "WORLD": lambda: dist.group.WORLD is not None,
    "get_rank": lambda: dist.get_rank() == 0,
    "get_backend": lambda: dist.get_backend() == "gloo",
    "barrier": lambda: dist.barrier() is None,
    "new_group": lambda: dist.new_group([0]) is not None,
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)) is None,
    "store": lambda: c10d._get_default_store() is not None,
}


@pytest.mark.parametrize("name", ASKED)
def test_who_asks_torch_for_the_group_sees_one(make_join, monkeypatch, name: str):
    waiting = go_on_when_waited_for(make_join(), monkeypatch)
    assert ASKED[name]()
    assert set(waiting) == {threading.current_thread().name}
    assert joining_group() is None


def test_another_thread_of_the_user_waits_too(make_join):
    join, answers = make_join(), []
    thread = threading.Thread(target=lambda: answers.append(dist.is_initialized()))
    join.stopped.set()  # that is for the training thread only
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    join.go_on.set()
    thread.join(LIMIT_S)
    assert answers == [True]


def test_import_of_a_module_of_torch_does_not_wait(make_join):
    """torch._dynamo imports modules that have the default group as default arguments, and what
    joins waits until torch._dynamo is imported: neither would have ended."""
    join = make_join()
    limit = threading.Timer(10.0, join.stopped.set)
    limit.start()
    namespace = {"__name__": "torch.distributed.nn.functional"}
    exec("from torch.distributed import group; default = group.WORLD", namespace)
    assert namespace["default"] is None
    limit.cancel()
    assert not join.go_on.is_set()


def test_wait_is_interrupted(make_join):
    join = make_join()
    threading.Timer(0.05, join.stopped.set).start()
    with pytest.raises(StoppedError):
        dist.get_rank()
    assert not join.group._ended.is_set(), "the join goes on until it is ended"


def test_error_of_the_join_is_raised_where_the_group_is_asked_for(make_join):
    make_join(dist.DistNetworkError("the peer has left")).go_on.set()
    for call in (dist.is_initialized, dist.get_world_size, joining_group().wait):
        with pytest.raises(dist.DistNetworkError, match="the peer has left"):
            call()
    end_joining(lambda: None)
    assert not dist.is_initialized()


def test_interrupt_is_preferred_to_the_error_that_it_causes(make_join):
    join = make_join(dist.DistNetworkError("closed"))
    join.stopped.set()
    join.go_on.set()
    join.group._thread.join(LIMIT_S)
    with pytest.raises(StoppedError):
        dist.get_rank()


def test_no_thread_joins_when_it_has_been_ended(make_join):
    """An interrupt may come before the wait that it is to end."""
    join, interrupts = make_join(dist.DistNetworkError("closed")), []

    def interrupt() -> None:
        interrupts.append(1)
        if len(interrupts) == 3:
            join.go_on.set()

    with pytest.raises(RuntimeError, match="still joining"):
        JoiningGroup(join.run, 0, 1, CPU, "gloo", join.check).start()
    end_joining(interrupt)
    assert len(interrupts) >= 3
    assert not join.group._thread.is_alive()
    assert joining_group() is None


def test_engine_on_nccl_waits_in_its_first_collective(make_join, monkeypatch):
    join = make_join(backend="nccl")
    join.group.world_size = 2
    collectives, device = connect_collectives()
    assert (collectives.rank, collectives.world_size, device) == (0, 2, CPU)
    assert isinstance(collectives._backend, NcclBackend)
    assert not join.go_on.is_set()
    waiting = go_on_when_waited_for(join, monkeypatch)
    collectives.all_reduce(torch.ones(1)).wait()
    assert waiting


def test_one_rank_never_waits(make_join):
    join = make_join()
    assert connect_collectives()[0].world_size == 1
    assert not join.go_on.is_set()


def test_start_waits_with_a_torch_that_keeps_its_group_elsewhere(monkeypatch):
    monkeypatch.setattr(module, "_install_waiting_world", lambda: False)
    join = Join()
    join.go_on.set()
    join.group.start()
    assert not join.group._thread.is_alive() or join.group._ended.is_set()
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_installed_world_is_the_same_object(make_join):
    world = c10d._world
    make_join()
    assert c10d._world is world
    assert isinstance(world, c10d._World)
    assert module._install_waiting_world(), "a second time"

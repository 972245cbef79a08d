"""Launch order of reductions, with fake stores and recording collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rayzero.engine.errors import EngineError
from rayzero.engine.layout.flat_layout import ParamSpec, make_layout
from rayzero.engine.zero.gradients import GradBufferPool, PartialGrads, ShardedGrads
from rayzero.engine.zero.placement import Collective
from rayzero.engine.zero.reducer import Reducer


class CallLog:
    """The calls of all fakes, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def of(self, *kinds: str) -> list[str]:
        return [event for event in self.events if event.split()[0] in kinds]


class FakeWork:
    def __init__(self, name: str, log: CallLog) -> None:
        self._name, self._log = name, log

    def wait(self) -> None:
        self._log.events.append(f"wait {self._name}")

    def release(self) -> None:
        self._log.events.append(f"release {self._name}")


class FakeStore:
    """Fake gradients of one unit; acquires buffers as the real store does."""

    def __init__(self, name: str, log: CallLog, pool: GradBufferPool | None) -> None:
        self.name, self._log, self._pool = name, log, pool
        self._buffer: Tensor | None = None
        self._reducing: list[Tensor] = []

    @property
    def needs_buffer(self) -> bool:
        return self._pool is not None and self._buffer is None

    def _acquire(self) -> None:
        if self._pool is not None and self._buffer is None:
            self._buffer = self._pool.acquire()

    def accumulate(self, index: int, grad: Tensor, *, add: bool) -> None:
        self._acquire()
        self._log.events.append(f"{'add' if add else 'put'} {self.name}.{index}")

    def accumulate_zero(self, index: int) -> None:
        self._acquire()
        self._log.events.append(f"zero {self.name}.{index}")

    def reduce(self, *, first: bool) -> FakeWork:
        self._acquire()
        if self._buffer is not None:
            self._reducing.append(self._buffer)
            self._buffer = None
        self._log.events.append(f"launch {self.name}{'' if first else '+'}")
        return FakeWork(self.name, self._log)

    def on_reduced(self, work: FakeWork) -> None:
        if self._pool is not None:
            self._pool.release(self._reducing.pop(0), work)
        self._log.events.append(f"done {self.name}")


def make(
    counts: Sequence[int], *, max_buffers: int | None = None, overlap: bool = True
) -> tuple[Reducer, CallLog, GradBufferPool | None]:
    """A reducer over units named a, b, c... with the given numbers of parameters."""
    log = CallLog()
    pool = None if max_buffers is None else GradBufferPool(lambda: torch.zeros(1), max_buffers)
    units: list[Any] = [(FakeStore("abcdef"[i], log, pool), n) for i, n in enumerate(counts)]
    return Reducer(units, pool, overlap=overlap), log, pool


def arrive(reducer: Reducer, *which: str) -> None:
    """Passes gradients as hooks do: "b1" is parameter 1 of the second unit."""
    for name in which:
        param = nn.Parameter(torch.zeros(1))
        param.grad = torch.ones(1)
        reducer.on_gradient("abcdef".index(name[0]), int(name[1]), param)
        assert param.grad is None  # freed at once


@given(st.permutations(["a0", "a1", "b0", "c0", "c1", "c2"]), st.none() | st.integers(1, 3))
def test_launch_order_is_plan_order(order: list[str], max_buffers: int | None) -> None:
    reducer, log, pool = make([2, 1, 3], max_buffers=max_buffers)
    for _ in range(2):
        reducer.begin_backward(first=True, last=True)
        arrive(reducer, *order)
        reducer.finish_backward()
        reducer.wait()
    assert log.of("launch") == ["launch a", "launch b", "launch c"] * 2
    assert log.of("wait") == ["wait a", "wait b", "wait c"] * 2
    if pool is not None:
        assert len(pool._free) == len(pool.buffers) <= max(3, max_buffers or 0)


def test_unit_is_launched_when_it_and_its_predecessors_are_complete() -> None:
    reducer, log, _ = make([1, 2])
    reducer.begin_backward(first=True, last=True)
    arrive(reducer, "b0", "b1")
    assert log.of("launch") == []
    arrive(reducer, "a0")
    assert log.of("launch", "wait") == ["launch a", "launch b"]  # without a wait


def test_without_overlap_every_reduction_is_waited_for() -> None:
    reducer, log, _ = make([1, 1], overlap=False)
    reducer.begin_backward(first=True, last=True)
    arrive(reducer, "a0", "b0")
    assert log.of("launch", "wait", "done", "put") == [
        *("put a.0", "launch a", "wait a", "done a"),
        *("put b.0", "launch b", "wait b", "done b"),
    ]


def test_full_pool_waits_for_the_oldest_reduction() -> None:
    reducer, log, pool = make([1, 1, 1, 1], max_buffers=2)
    reducer.begin_backward(first=True, last=True)
    arrive(reducer, "a0", "b0")
    assert log.of("wait") == []
    arrive(reducer, "c0")
    assert log.of("wait") == ["wait a"]
    arrive(reducer, "d0")
    assert log.of("wait") == ["wait a", "wait b"]
    assert pool is not None
    assert len(pool.buffers) == 2


def test_buffer_is_reused_after_release() -> None:
    reducer, log, _ = make([1, 1, 1, 1], max_buffers=2)
    reducer.begin_backward(first=True, last=True)
    arrive(reducer, "a0", "b0", "c0", "d0")
    assert log.of("wait", "release", "put") == [
        *("put a.0", "put b.0"),
        *("wait a", "release a", "put c.0", "wait b", "release b", "put d.0"),
    ]


def test_gradients_out_of_order_allocate_more_buffers() -> None:
    reducer, log, pool = make([1, 1, 1, 1], max_buffers=2)
    reducer.begin_backward(first=True, last=True)
    arrive(reducer, "d0", "c0", "b0")  # none of them may be launched before a
    assert pool is not None
    assert len(pool.buffers) == 3
    assert log.of("launch", "wait") == []
    arrive(reducer, "a0")
    reducer.finish_backward()
    reducer.wait()
    assert log.of("launch") == ["launch a", "launch b", "launch c", "launch d"]
    assert len(pool._free) == len(pool.buffers) == 4


def test_full_gradients_are_reduced_once_a_step() -> None:
    reducer, log, _ = make([1, 1])
    reducer.begin_backward(first=True, last=False)
    arrive(reducer, "a0", "b0")
    reducer.finish_backward()
    assert log.of("launch") == []
    reducer.begin_backward(first=False, last=True)
    arrive(reducer, "a0", "b0")
    reducer.finish_backward()
    assert log.events == ["put a.0", "put b.0", "add a.0", "launch a+", "add b.0", "launch b+"]


def test_sharded_gradients_are_reduced_every_micro_step() -> None:
    reducer, log, _ = make([1], max_buffers=1)
    for micro_step in range(3):
        reducer.begin_backward(first=micro_step == 0, last=micro_step == 2)
        arrive(reducer, "a0")
        reducer.finish_backward()
    # A buffer holds one micro-step: it is overwritten, never added to another unit's content.
    assert log.of("put", "add", "launch") == [
        *("put a.0", "launch a", "put a.0", "launch a+", "put a.0", "launch a+"),
    ]


def test_gradients_of_a_reused_parameter_are_added() -> None:
    reducer, log, _ = make([2])
    reducer.begin_backward(first=True, last=True)
    arrive(reducer, "a0", "a0", "a1")
    assert log.events == ["put a.0", "add a.0", "put a.1", "launch a"]


def test_missing_gradients_are_zero() -> None:
    reducer, log, _ = make([2, 1])
    reducer.begin_backward(first=True, last=True)
    arrive(reducer, "a1")
    reducer.finish_backward()
    assert log.events == ["put a.1", "zero a.0", "launch a", "zero b.0", "launch b"]


def test_missing_gradient_keeps_earlier_micro_steps() -> None:
    reducer, log, _ = make([1])
    reducer.begin_backward(first=True, last=False)
    arrive(reducer, "a0")
    reducer.finish_backward()
    reducer.begin_backward(first=False, last=True)
    reducer.finish_backward()
    assert log.events == ["put a.0", "launch a+"]


def test_hook_without_gradient_has_no_effect() -> None:
    reducer, log, _ = make([1])
    reducer.begin_backward(first=True, last=True)
    reducer.on_gradient(0, 0, nn.Parameter(torch.zeros(1)))
    assert log.events == []


@pytest.mark.parametrize("max_buffers", [None, 2])
def test_gradient_after_launch_is_an_error(max_buffers: int | None) -> None:
    reducer, _, _ = make([1, 1], max_buffers=max_buffers)
    reducer.begin_backward(first=True, last=True)
    arrive(reducer, "a0")
    with pytest.raises(EngineError, match=r"second gradient(?s:.*)use_reentrant=False"):
        arrive(reducer, "a0")


def test_failed_backward_resets_the_reducer() -> None:
    reducer, log, _ = make([2], max_buffers=2)
    reducer.begin_backward(first=True, last=True)
    arrive(reducer, "a0")  # and an exception
    reducer.begin_backward(first=True, last=True)
    arrive(reducer, "a1", "a0")
    reducer.finish_backward()
    assert log.events == ["put a.0", "put a.1", "put a.0", "launch a"]


LAYOUT = make_layout("unit", [ParamSpec("a", (3,)), ParamSpec("b", (2, 2))], 2)


class RecordingCollectives:
    """Collectives that record their arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Tensor], bool]] = []

    def all_reduce(self, full: Tensor) -> None:
        self.calls.append(("all_reduce", [full], False))

    def reduce_scatter(self, full: Tensor, out: Tensor, accumulate: bool = False) -> None:
        self.calls.append(("reduce_scatter", [full, out], accumulate))


@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.REDUCE_SCATTER])
def test_full_gradients_are_reduced_in_place(collective: Collective) -> None:
    flat = torch.zeros(LAYOUT.numel)
    collectives: Any = RecordingCollectives()
    store = PartialGrads(LAYOUT, flat, LAYOUT.shard(1), collective, collectives)
    store.accumulate(0, torch.ones(3), add=False)
    store.accumulate(0, torch.ones(3), add=True)
    store.accumulate(1, torch.ones(2, 2), add=False)
    store.accumulate_zero(1)
    assert flat[:3].tolist() == [2, 2, 2]
    assert flat.sum() == 6
    store.reduce(first=True)
    ((name, tensors, _),) = collectives.calls
    assert name == collective.value
    assert tensors[0] is flat
    assert store.owned().data_ptr() == flat[LAYOUT.shard(1)].data_ptr()


def test_sharded_gradients_use_a_buffer_with_clean_padding() -> None:
    pool = GradBufferPool(lambda: torch.zeros(2 * LAYOUT.numel), 1)
    work = FakeWork("earlier", CallLog())
    pool.release(pool.acquire().fill_(7), work)  # content of a longer unit
    shard = torch.zeros(LAYOUT.shard_numel)
    collectives: Any = RecordingCollectives()
    store = ShardedGrads(LAYOUT, shard, LAYOUT.shard(0), pool, collectives)
    assert store.needs_buffer
    store.accumulate(0, torch.ones(3), add=False)
    assert not store.needs_buffer
    store.accumulate_zero(1)
    store.reduce(first=False)
    ((name, (full, out), accumulate),) = collectives.calls
    assert (name, accumulate) == ("reduce_scatter", True)
    assert full.sum() == 3
    assert full.numel() == LAYOUT.numel
    assert out is shard is store.owned()
    assert pool.exhausted
    store.on_reduced(work)
    assert not pool.exhausted

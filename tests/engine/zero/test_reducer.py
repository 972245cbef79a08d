"""Launch order of reductions, with fake stores and recording collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rayzero.engine.comm.backend import CompletedWork
from rayzero.engine.errors import EngineError
from rayzero.engine.layout.flat_layout import ParamSpec, UnitLayout, make_layout
from rayzero.engine.zero.grad_buffers import GradBufferPool
from rayzero.engine.zero.gradients import PartialGrads, ShardedGrads
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

    dtype = torch.float64

    def __init__(self, name: str, log: CallLog, pool: GradBufferPool | None, parts: int) -> None:
        self.name, self._log, self._pool = name, log, pool
        self.part_count = parts
        self.collected: list[Tensor | None] = []
        if pool is not None:
            pool.announce(parts, 1)

    def collect(self, grads: list[Tensor | None], *, add: bool) -> None:
        self.collected = grads
        which = "".join("-" if grad is None else str(int(grad)) for grad in grads)
        self._log.events.append(f"{'add' if add else 'put'} {self.name}.{which}")

    def reduce(self, part: int, *, first: bool) -> FakeWork:
        name = self.name + (f"/{part}" if self.part_count > 1 else "")
        work = FakeWork(name, self._log)
        if self._pool is not None:
            self._pool.acquire().reduction = work
        self._log.events.append(f"launch {name}{'' if first else '+'}")
        return work


def make(
    counts: Sequence[int],
    *,
    max_buffers: int | None = None,
    overlap: bool = True,
    parts: int = 1,
) -> tuple[Reducer, CallLog, GradBufferPool | None]:
    """A reducer over units named a, b, c... with the given numbers of parameters."""
    log = CallLog()
    pool = None if max_buffers is None else GradBufferPool(torch.zeros, max_buffers, 1)
    units: list[Any] = [(FakeStore("abcdef"[i], log, pool, parts), n) for i, n in enumerate(counts)]
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
    waited = [event.split()[1] for event in log.of("wait", "release")]
    assert list(dict.fromkeys(waited)) == ["a", "b", "c"]
    if pool is not None:
        assert len(pool.buffers) == max_buffers


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
    assert log.of("launch", "wait", "put") == [
        *("put a.1", "launch a", "wait a"),
        *("put b.1", "launch b", "wait b"),
    ]


def test_full_pool_waits_for_the_oldest_reduction() -> None:
    reducer, log, pool = make([1, 1, 1, 1], max_buffers=2)
    reducer.begin_backward(first=True, last=True)
    arrive(reducer, "a0", "b0")
    assert log.of("launch", "wait", "release") == ["launch a", "launch b"]
    arrive(reducer, "c0", "d0")
    assert log.of("wait", "release", "launch") == [
        *("launch a", "launch b"),
        *("release a", "launch c", "release b", "launch d"),
    ]
    reducer.wait()
    assert log.of("wait") == ["wait c", "wait d"]  # released ones have been waited for
    assert pool is not None
    assert len(pool.buffers) == 2


def test_no_more_buffers_than_parts() -> None:
    reducer, log, pool = make([1], max_buffers=3, parts=2)
    for micro_step in range(2):
        reducer.begin_backward(first=micro_step == 0, last=micro_step == 1)
        arrive(reducer, "a0")
    assert log.of("release") == ["release a/0", "release a/1"]
    assert pool is not None
    assert len(pool.buffers) == 2


def test_gradients_out_of_order_are_held_and_take_no_buffer() -> None:
    reducer, log, pool = make([1, 1, 1, 1], max_buffers=2)
    reducer.begin_backward(first=True, last=True)
    arrive(reducer, "d0", "c0", "b0")  # none of them may be launched before a
    assert pool is not None
    assert log.events == pool.buffers == []
    arrive(reducer, "a0")
    reducer.finish_backward()
    reducer.wait()
    assert log.of("launch") == ["launch a", "launch b", "launch c", "launch d"]
    assert len(pool.buffers) == 2


@pytest.mark.parametrize("max_buffers", [1, 2])
def test_parts_of_a_unit_are_launched_in_order_and_share_the_buffers(max_buffers: int) -> None:
    reducer, log, pool = make([1, 1], max_buffers=max_buffers, parts=3)
    reducer.begin_backward(first=True, last=True)
    arrive(reducer, "a0")
    assert log.of("launch") == ["launch a/0", "launch a/1", "launch a/2"]
    assert log.of("release") == [f"release a/{part}" for part in range(3 - max_buffers)]
    arrive(reducer, "b0")
    reducer.wait()
    parts = [f"{unit}/{part}" for unit in "ab" for part in range(3)]
    assert [event.split()[1] for event in log.of("release", "wait")] == parts
    assert pool is not None
    assert len(pool.buffers) == max_buffers


def test_full_gradients_are_reduced_once_a_step() -> None:
    reducer, log, _ = make([1, 1])
    reducer.begin_backward(first=True, last=False)
    arrive(reducer, "a0", "b0")
    reducer.finish_backward()
    assert log.of("launch") == []
    reducer.begin_backward(first=False, last=True)
    arrive(reducer, "a0", "b0")
    reducer.finish_backward()
    assert log.events == ["put a.1", "put b.1", "add a.1", "launch a+", "add b.1", "launch b+"]


def test_sharded_gradients_are_reduced_every_micro_step() -> None:
    reducer, log, _ = make([1], max_buffers=1)
    for micro_step in range(3):
        reducer.begin_backward(first=micro_step == 0, last=micro_step == 2)
        arrive(reducer, "a0")
        reducer.finish_backward()
    assert log.of("launch") == ["launch a", "launch a+", "launch a+"]


def test_gradients_of_a_reused_parameter_are_added_in_the_main_dtype() -> None:
    reducer, log, _ = make([2])
    reducer.begin_backward(first=True, last=True)
    arrive(reducer, "a0", "a0", "a1")
    assert log.events == ["put a.21", "launch a"]
    first, second = reducer._units[0].grads.collected  # type: ignore[attr-defined]
    assert (first.dtype, second.dtype) == (torch.float64, torch.float32)


def test_gradient_of_a_complete_unit_before_its_launch_is_added() -> None:
    reducer, log, _ = make([1, 1], max_buffers=2)
    reducer.begin_backward(first=True, last=True)
    arrive(reducer, "b0", "b0", "a0")
    assert log.of("put") == ["put a.1", "put b.2"]


@pytest.mark.parametrize("first", [True, False])
def test_gradient_of_a_collected_unit_is_added_where_nothing_is_reduced(first: bool) -> None:
    reducer, log, _ = make([2])
    reducer.begin_backward(first=first, last=False)
    arrive(reducer, "a0", "a1", "a1", "a1")
    reducer.finish_backward()
    assert log.events == [f"{'put' if first else 'add'} a.11", "add a.-2"]


def test_missing_gradients_are_zero() -> None:
    reducer, log, _ = make([2, 1])
    reducer.begin_backward(first=True, last=True)
    arrive(reducer, "a1")
    reducer.finish_backward()
    assert log.events == ["put a.-1", "launch a", "put b.-", "launch b"]


def test_missing_gradients_of_a_first_micro_step_are_zero_too() -> None:
    reducer, log, _ = make([2, 1])
    reducer.begin_backward(first=True, last=False)
    arrive(reducer, "a1")
    reducer.finish_backward()
    assert log.events == ["put a.-1", "put b.-"]


def test_missing_gradient_keeps_earlier_micro_steps() -> None:
    reducer, log, _ = make([1])
    reducer.begin_backward(first=True, last=False)
    arrive(reducer, "a0")
    reducer.finish_backward()
    reducer.begin_backward(first=False, last=True)
    reducer.finish_backward()
    assert log.events == ["put a.1", "add a.-", "launch a+"]


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
    assert log.events == ["put a.11", "launch a"]


LAYOUT = make_layout("unit", [ParamSpec("a", (3,)), ParamSpec("b", (2, 2))], 2)


class RecordingCollectives:
    """Collectives that record their arguments."""

    single_collective = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Tensor], bool]] = []

    def all_reduce(self, full: Tensor) -> None:
        self.calls.append(("all_reduce", [full], False))

    def reduce_scatter(self, full: Tensor, out: Tensor, accumulate: bool = False) -> CompletedWork:
        self.calls.append(("reduce_scatter", [full, out], accumulate))
        return CompletedWork()


@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.REDUCE_SCATTER])
def test_full_gradients_are_reduced_in_place(collective: Collective) -> None:
    flat = torch.zeros(LAYOUT.numel)
    collectives: Any = RecordingCollectives()
    shard = LAYOUT.shard(1)
    store = PartialGrads(LAYOUT, flat, shard, collective, collectives, shard=shard)
    store.collect([torch.ones(3), torch.ones(2, 2)], add=False)
    store.collect([torch.ones(3), None], add=True)
    assert flat[:3].tolist() == [2, 2, 2]
    assert flat.sum() == 10
    store.collect([torch.ones(3), None], add=False)
    assert flat.sum() == 3
    store.reduce(0, first=True)
    ((name, tensors, _),) = collectives.calls
    assert name == collective.value
    assert tensors[0] is flat
    assert store.owned().data_ptr() == flat[LAYOUT.shard(1)].data_ptr()


def make_sharded(
    layout: UnitLayout, rank: int, part_numel: int
) -> tuple[ShardedGrads, RecordingCollectives, GradBufferPool]:
    """A store with a pool of one buffer, in which another unit has left something."""
    pool = GradBufferPool(torch.zeros, 1, part_numel)
    collectives: Any = RecordingCollectives()
    shard = torch.zeros(layout.shard_numel)
    store = ShardedGrads(layout, shard, layout.shard(rank), pool, collectives)
    pool.acquire().tensor.fill_(7)
    return store, collectives, pool


def test_sharded_gradients_use_a_buffer_with_clean_padding() -> None:
    store, collectives, _ = make_sharded(LAYOUT, 0, 10**6)
    store.collect([torch.ones(3), None], add=False)
    store.reduce(0, first=False)
    ((name, (full, out), accumulate),) = collectives.calls
    assert (name, accumulate) == ("reduce_scatter", True)
    assert full.sum() == 3
    assert full.numel() == LAYOUT.numel
    assert out.data_ptr() == store.owned().data_ptr()


SHAPES = st.lists(st.sampled_from([(1,), (31,), (33, 7), (64,), (300,)]), min_size=1, max_size=6)


@settings(max_examples=50)
@given(SHAPES, st.integers(1, 5), st.integers(30, 600), st.sets(st.integers(0, 5)))
def test_parts_are_the_columns_of_all_shards(
    shapes: list[tuple[int, ...]], world: int, part_numel: int, absent: set[int]
) -> None:
    layout = make_layout(
        "unit", [ParamSpec(str(i), shape) for i, shape in enumerate(shapes)], world
    )
    store, collectives, pool = make_sharded(layout, world - 1, part_numel)
    grads: list[Tensor | None] = [
        None if i in absent else torch.randn(shape) for i, shape in enumerate(shapes)
    ]
    whole = torch.zeros(layout.numel)  # the unit's flat gradients
    for index, grad in enumerate(grads):
        if grad is not None:
            whole[layout.param_range(index)] = grad.flatten()
    store.collect(grads, add=False)
    column, rows = 0, whole.view(world, -1)
    for part in range(store.part_count):
        store.reduce(part, first=True)
        full, out = collectives.calls[part][1]
        width = out.numel()
        assert torch.equal(full.view(world, width), rows[:, column : column + width])
        assert out.data_ptr() == store.owned()[column:].data_ptr()
        assert full.numel() <= part_numel + 2 * 32 * world + layout.numel - layout.logical_numel
        column += width
    assert column == layout.shard_numel
    assert pool.numel == max(call[1][0].numel() for call in collectives.calls)
    assert store._grads == []  # freed

"""Launch order of reductions, with fake stores and recording collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rayzero.engine.comm.backend import Work
from rayzero.engine.errors import EngineError
from rayzero.engine.layout.flat_layout import ParamSpec, UnitLayout, make_layout
from rayzero.engine.zero.gradients import GradBufferPool, ShardedGrads
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
    reducer = Reducer(units, pool, overlap=overlap)
    reducer.backward.begin(lambda: True)
    return reducer, log, pool


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


def run(reducer: Reducer, script: str) -> None:
    """Backwards, with the gradients that arrive; "first" and "last" of their step; "..." where one
    does not end."""
    for line in script.split("; "):
        words = line.split()
        flags = {"first", "last", "..."}.intersection(words)
        reducer.begin_backward(first="first" in flags, last="last" in flags)
        arrive(reducer, *(word for word in words if word not in flags))
        if "..." not in flags:
            reducer.finish_backward()


COURSES = [  # parameters by unit, settings, backwards, events: in this order
    # A unit is launched when it and its predecessors are complete, without a wait.
    ([1, 2], {}, "first last b0 b1 ...", ""),
    ([1, 2], {}, "first last b0 b1 a0 ...", "put a.1, launch a, put b.11, launch b"),
    # Without overlap every reduction is waited for.
    (
        [1, 1],
        {"overlap": False},
        "first last a0 b0",
        "put a.1, launch a, wait a, put b.1, launch b, wait b",
    ),
    # A full pool waits for the oldest reduction.
    (
        [1, 1, 1],
        {"max_buffers": 2},
        "first last a0 b0 c0 ...",
        "put a.1, launch a, put b.1, launch b, put c.1, release a, launch c",
    ),
    # Gradients out of order are held, and take no buffer.
    ([1, 1, 1], {"max_buffers": 2}, "first last c0 b0 ...", ""),
    # There are no more buffers than parts, and parts are launched in order.
    (
        [1],
        {"max_buffers": 3, "parts": 2},
        "first a0; last a0",
        "put a.1, launch a/0, launch a/1, add a.1, release a/0, launch a/0+, release a/1, "
        "launch a/1+",
    ),
    (
        [1],
        {"max_buffers": 2, "parts": 3},
        "first last a0",
        "put a.1, launch a/0, launch a/1, release a/0, launch a/2",
    ),
    # Sharded gradients are reduced in every micro-step.
    (
        [1],
        {"max_buffers": 1},
        "first a0; a0; last a0",
        "put a.1, launch a, add a.1, release a, launch a+, add a.1, release a, launch a+",
    ),
    # One that arrives again before its unit's launch is added.
    ([1, 1], {}, "first last b0 b0 a0", "put a.1, launch a, put b.2, launch b"),
    ([2], {}, "first a0 a1 a1 a1", "put a.11, add a.-2"),
]


@pytest.mark.parametrize(("counts", "settings", "script", "events"), COURSES)
def test_courses(counts: list[int], settings: dict[str, Any], script: str, events: str) -> None:
    reducer, log, pool = make(counts, **settings)
    run(reducer, script)
    assert ", ".join(log.events) == events
    assert pool is None or len(pool.buffers) <= pool.max_count


def test_reused_parameters_are_added_in_the_main_dtype() -> None:
    reducer, log, _ = make([2])
    run(reducer, "first last a0 a0 a1")
    first, second = reducer._units[0].grads.collected  # type: ignore[attr-defined]
    assert (first.dtype, second.dtype) == (torch.float64, torch.float32)
    reducer.begin_backward(first=True, last=True)
    log.events.clear()
    reducer.on_gradient(0, 0, nn.Parameter(torch.zeros(1)))  # without a gradient
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


class RecordingCollectives:
    """Collectives that record their arguments."""

    single_collective = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Tensor], bool]] = []

    def reduce_scatter(self, full: Tensor, out: Tensor, accumulate: bool = False) -> Work:
        self.calls.append(("reduce_scatter", [full, out], accumulate))
        return Work()


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

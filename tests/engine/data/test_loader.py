"""Step loader and its prefetching: order at any world size, epochs, weights, errors, threads."""

from __future__ import annotations

import gc
import threading
from collections import namedtuple
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from rayzero.engine.data.loader import StepLoader
from rayzero.engine.data.micro_batches import MicroBatches
from rayzero.engine.data.prefetch import Prefetch, batch_to_device
from rayzero.engine.data.sample_source import DatasetSource
from rayzero.engine.data.sampling import SampleOrder, StepSplit, TrainingProgress, assign_step
from rayzero.engine.device import get_device
from rayzero.engine.errors import DataError, EngineError
from rayzero.engine.session import NO_HOST, HostSession


def prefetch_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "rayzero-prefetch"]


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    yield
    if prefetch_threads():
        gc.collect()
    for thread in prefetch_threads():
        thread.join(2)
    assert prefetch_threads() == []


def make_loader(
    length: int = 10,
    global_batch: int = 4,
    micro_batch: int = 2,
    world: tuple[int, int] = (1, 0),
    progress: TrainingProgress | None = None,
    shares: tuple[float, ...] = (),
    session: HostSession = NO_HOST,
) -> StepLoader:
    """A loader whose samples are their indices."""
    step_plan = assign_step(global_batch, *world, micro_batch, shares)
    progress = progress or TrainingProgress(global_batch=global_batch)
    own = MicroBatches(progress, StepSplit(step_plan), session)
    return StepLoader(DatasetSource(list(range(length)), 1), own)


def make_single_loader(data: Any, batch: int = 1, seed: int = 0, **options: Any) -> StepLoader:
    """A loader for one rank with one micro-batch per step."""
    progress, step_plan = TrainingProgress(global_batch=batch), assign_step(batch, 1, 0, batch)
    own = MicroBatches(progress, StepSplit(step_plan))
    return StepLoader(DatasetSource(data, seed), own, **options)


def consume(step_loader: StepLoader, batches: Iterator) -> list[tuple[list[int], float]]:
    """Iterate like the engine; return (samples, weight) of each micro-batch."""
    consumed = []
    own = step_loader._micro_batches
    for batch in batches:
        progress = step_loader.progress
        own.on_forward(batch)
        consumed.append((batch.tolist(), own.begin_backward(step_due=False)))
        own.begin_step(ends_step=progress.micro_step == step_loader.micro_steps - 1)
        progress.micro_step += 1
        if progress.micro_step == step_loader.micro_steps:
            progress.micro_step = 0
            progress.step += 1
            progress.sample_cursor += progress.global_batch
        own.end_step()
    return consumed


def weighted_samples(consumed: list[tuple[list[int], float]]) -> list[int]:
    return [sample for samples, weight in consumed if weight for sample in samples]


@settings(max_examples=30)
@given(
    length=st.integers(1, 40),
    global_batch=st.integers(1, 12),
    micro_batch=st.integers(1, 5),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4),
)
def test_sample_order_is_independent_of_world_sizes(
    length: int, global_batch: int, micro_batch: int, worlds: list[tuple[int, int]]
) -> None:
    """The world size changes after any number of steps; the ranks follow the global order."""
    cursor, history = 0, []
    for world_size, steps in worlds:
        ranks = []
        for rank in range(world_size):
            step_loader = make_loader(
                length,
                global_batch,
                micro_batch,
                (world_size, rank),
                TrainingProgress(sample_cursor=cursor, global_batch=global_batch),
            )
            consumed = consume(step_loader, step_loader.steps(steps))
            count = step_loader.micro_steps
            assert len(consumed) == steps * count
            ranks.append([consumed[s * count : (s + 1) * count] for s in range(steps)])
        for step in range(steps):
            history += [sample for rank in ranks for sample in weighted_samples(rank[step])]
            assert sum(w for rank in ranks for _, w in rank[step]) == pytest.approx(1.0)
        cursor += steps * global_batch
    assert history == SampleOrder(length, 1).indices(0, cursor).tolist()


@given(length=st.integers(1, 50), global_batch=st.integers(1, 60), steps=st.integers(0, 50))
def test_len_is_the_number_of_remaining_batches(length: int, global_batch: int, steps: int) -> None:
    step_loader = make_loader(
        length,
        global_batch,
        3,
        progress=TrainingProgress(sample_cursor=steps * global_batch, global_batch=global_batch),
    )
    epoch = steps * global_batch // length
    starts = [
        s * global_batch
        for s in range(300)
        if epoch * length <= s * global_batch < (epoch + 1) * length
    ]
    assert len(step_loader) == len(starts) * step_loader.micro_steps


@pytest.mark.parametrize(
    ("begin", "go_on"),
    [(iter, lambda loader: loader.steps(1)), (lambda loader: loader.until(2),) * 2],
    ids=["steps", "until"],
)
def test_iteration_resumes_within_a_step(begin: Any, go_on: Any) -> None:
    step_loader = make_loader(length=10, global_batch=6, micro_batch=2)
    batches = begin(step_loader)
    first = consume(step_loader, (next(batches) for _ in range(4)))
    second = consume(step_loader, go_on(step_loader))
    assert step_loader.progress.step == 2
    assert weighted_samples(first + second) == SampleOrder(10, 1).indices(0, 12).tolist()


def test_ranks_without_samples_borrow_a_sample() -> None:
    step_loader = make_loader(length=10, global_batch=2, micro_batch=1, world=(3, 2))
    (samples, weight), *_ = consume(step_loader, step_loader.steps(1))
    assert weight == 0.0
    assert samples == SampleOrder(10, 1).indices(0, 1).tolist()


def test_uneven_shares() -> None:
    shares = (0.75, 0.25)
    ranks = [make_loader(20, 8, 2, (2, rank), shares=shares) for rank in range(2)]
    assert [step_loader.micro_steps for step_loader in ranks] == [3, 3]
    samples = [
        weighted_samples(consume(step_loader, step_loader.steps(2))) for step_loader in ranks
    ]
    order = SampleOrder(20, 1).indices(0, 16).tolist()
    assert samples == [order[:6] + order[8:14], order[6:8] + order[14:16]]


@given(
    length=st.integers(1, 20),
    global_batch=st.integers(1, 25),
    count=st.integers(0, 4),
    steps_done=st.integers(0, 30),
)
@settings(max_examples=50, deadline=None)
def test_epochs_yields_remaining_epochs(
    length: int, global_batch: int, count: int, steps_done: int
) -> None:
    """A step belongs to the epoch of its first sample."""
    progress = TrainingProgress(
        step=steps_done, sample_cursor=steps_done * global_batch, global_batch=global_batch
    )
    step_loader = make_loader(length, global_batch, 3, progress=progress)
    yielded, steps = [], []
    for epoch in step_loader.epochs(count):
        yielded.append(epoch)
        first = step_loader.progress.step
        consume(step_loader, iter(step_loader))
        steps += [(epoch, step) for step in range(first, step_loader.progress.step)]
    expected = [s for s in range(steps_done, 200) if s * global_batch < count * length]
    assert [step for _, step in steps] == expected
    assert yielded == sorted({step * global_batch // length for step in expected})
    assert all(epoch == step * global_batch // length for epoch, step in steps)


def test_epoch_without_a_step_is_an_error() -> None:
    step_loader = make_loader()
    with pytest.raises(EngineError, match="the loop over epoch 0 ended without a finished step"):
        for _ in step_loader.epochs(2):
            pass


class RecordingSession:
    """The part of a session that a loader uses."""

    epochs = None

    def __init__(self) -> None:
        self.samples: list[list[int]] = []

    def on_phase(self, name: str) -> None:
        assert name in ("data", "outside")

    def on_samples_consumed(self, samples: Sequence[int]) -> None:
        self.samples.append(list(samples))


def test_session_receives_samples_when_they_are_trained_on() -> None:
    session, order = RecordingSession(), SampleOrder(10, 1)
    step_loader = make_loader(
        length=10, global_batch=5, micro_batch=2, world=(2, 1), session=session
    )
    batches = list(step_loader.steps(2))
    assert session.samples == []  # read ahead
    consume(step_loader, iter(batches[:1]))
    assert session.samples == [order.indices(3, 1).tolist()]  # one of two, and no prefetched ones
    consume(step_loader, iter(batches[1:2]))
    assert session.samples[1:] == [order.indices(4, 1).tolist()]
    assert step_loader.micro_steps == 2


def test_session_receives_each_micro_batch_once() -> None:
    session, order = RecordingSession(), SampleOrder(10, 1)
    step_loader = make_loader(length=10, global_batch=4, micro_batch=2, session=session)
    next(iter(step_loader))  # discarded: the step continues from there
    consume(step_loader, step_loader.steps(2))
    reported = [sample for samples in session.samples for sample in samples]
    assert reported == order.indices(0, 8).tolist()


def test_new_iteration_closes_the_previous() -> None:
    step_loader = make_loader()
    previous = iter(step_loader)
    next(previous)
    next(iter(step_loader))
    with pytest.raises(EngineError, match="closed"):
        next(previous)


def test_iterators_stop_their_threads() -> None:
    step_loader = make_loader(length=1000)
    closed = step_loader.steps(100)
    next(closed)
    (thread,) = prefetch_threads()
    closed.close()
    assert not thread.is_alive()

    dropped = step_loader.until(100)
    next(dropped)
    (thread,) = prefetch_threads()
    del dropped
    assert not thread.is_alive()

    batches = iter(step_loader)
    assert prefetch_threads() == [], "it starts with the first batch"
    del batches
    consume(step_loader, step_loader.steps(1))
    assert prefetch_threads() == []

    def train() -> None:
        for _ in step_loader.steps(100):
            raise KeyError(prefetch_threads().pop())

    with pytest.raises(KeyError) as caught:
        train()
    (thread,) = caught.value.args
    del caught  # the traceback keeps the frame, which keeps the iterator
    assert not thread.is_alive()


class BrokenDataset(list):
    """A dataset with an unreadable sample."""

    def __getitem__(self, index):
        if index == 7:
            raise OSError("read error")
        return super().__getitem__(index)


def test_dataset_error_names_the_sample() -> None:
    step_loader = make_single_loader(BrokenDataset(range(10)), 2)
    with pytest.raises(DataError, match=r"sample 7 .* OSError: read error") as caught:
        consume(step_loader, iter(step_loader))
    assert isinstance(caught.value.__cause__, OSError)


def test_collation_error_names_the_samples() -> None:
    ragged = [torch.zeros(i) for i in range(4)]
    step_loader = make_single_loader(ragged, 2)
    with pytest.raises(DataError, match=r"samples \[\d, \d\] cannot be collated"):
        next(iter(step_loader))
    assert len(next(iter(make_single_loader(ragged, 2, collate_fn=list)))) == 2


def test_getitems_is_used_if_available() -> None:
    class BatchedDataset(list):
        def __getitems__(self, indices):
            assert type(indices) is list
            return [super(BatchedDataset, self).__getitem__(i) * 10 for i in indices]

    step_loader = make_single_loader(BatchedDataset(range(10)), 4, seed=1)
    assert next(iter(step_loader)).tolist() == [
        i * 10 for i in SampleOrder(10, 1).indices(0, 4).tolist()
    ]


class StreamDataset(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize("data", [StreamDataset(), iter([1, 2]), {1, 2}, object(), "a/*.parquet"])
def test_dataset_must_be_map_style(data: object) -> None:
    with pytest.raises(DataError, match="not a map-style dataset") as caught:
        make_single_loader(data)
    assert caught.value.fix


def test_empty_dataset_is_an_error() -> None:
    with pytest.raises(DataError, match="is empty"):
        make_single_loader([])


Pair = namedtuple("Pair", "x y")


def test_nested_batches_are_moved() -> None:
    meta = torch.device("meta")
    batch = {"a": torch.ones(2), "b": [Pair(torch.ones(1), "text"), (torch.ones(3),)]}
    assert batch_to_device(batch, torch.device("cpu")) is batch
    moved = batch_to_device(batch, meta)
    assert moved["a"].device == moved["b"][1][0].device == meta
    pair = moved["b"][0]
    assert type(pair) is Pair
    assert (pair.x.device, pair.y) == (meta, "text")


@pytest.mark.gpu
def test_batches_are_moved_to_gpu_through_pinned_memory() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    data = torch.arange(64 * 1024).view(64, 1024)
    step_loader = make_single_loader(data, 8, device=device)
    assert get_device(device).pin(data).is_pinned()
    batches = torch.cat(list(step_loader))
    assert batches.device == device
    assert torch.equal(batches.cpu(), data[SampleOrder(64, 0).indices(0, 64)])


LIMIT_S = 60.0


def test_items_in_order_then_the_error_of_the_source():
    def source() -> Iterator[int]:
        yield from range(5)
        raise ValueError("no more")

    prefetch = Prefetch(source())
    assert [next(prefetch) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="no more"):
        next(prefetch)
    with pytest.raises(StopIteration):
        next(prefetch)
    assert not prefetch._thread.is_alive()


def test_prefetch_is_bounded_by_its_depth():
    numbers = count()
    full = threading.Event()

    def source() -> Iterator[int]:
        for number in numbers:
            if number == 2:
                full.set()
            yield number

    prefetch = Prefetch(source(), depth=3)
    assert full.wait(LIMIT_S)
    assert next(prefetch) == 0
    prefetch.close()
    assert next(numbers) <= 4

"""Iterables through logical readers: one order at any number of ranks, through rewinds; errors."""

from __future__ import annotations

import gc
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rayzero
import rayzero.data
from rayzero.engine.data.loader import StepLoader
from rayzero.engine.data.micro_batches import MicroBatches
from rayzero.engine.data.sampling import StepSplit, TrainingProgress, assign_step
from rayzero.engine.data.streams.iterable_source import IterableSource
from rayzero.engine.data.streams.readers import IterableStream
from rayzero.engine.errors import ConfigError, DataError, EngineError
from rayzero.engine.state.ranges import pack_block
from rayzero.engine.state.registry import StateRegistry
from tests.engine.state.blocks import Block, BlocksSource
from tests.support.ranks import run_ranks


@pytest.fixture(autouse=True, scope="module")
def no_leaked_threads() -> Iterator[None]:
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "rayzero-prefetch":
            thread.join(5)
            assert not thread.is_alive()


class Rows:
    """Row i of epoch e is (reader, e, i). `begun` gets where each one begins."""

    def __init__(self, reader: int, count: int, begun: list[tuple[int, int, int]]) -> None:
        self.reader = reader
        self.count = count
        self.begun = begun
        self.epoch = 0
        self.next = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "weights": torch.full((3,), self.next)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["weights"].tolist() == [state["next"]] * 3
        self.next = state["next"]

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        self.begun.append((self.reader, self.epoch, self.next))
        while self.next < self.count:
            self.next += 1
            yield self.reader, self.epoch, self.next - 1


def no_check() -> None:
    pass


def make_stream(counts: Sequence[int], begun: list[Any] | None = None, **options: Any) -> Any:
    log = [] if begun is None else begun
    make = lambda reader, readers: Rows(reader, counts[reader], log)  # noqa: E731
    given = {"rows": counts, "snapshot_every": 7, **options}
    return rayzero.data.iterable(make, len(counts), **given)


def in_turn(rows: Sequence[int], *, endless: bool) -> Iterator[tuple[int, int, int]]:
    """The order in plain words."""
    places = [[reader, 0, 0] for reader in range(len(rows))]
    while True:
        ended = 0
        for place in places:
            if place[2] == rows[place[0]]:
                if not endless:
                    ended += 1
                    continue
                place[1] += 1
                place[2] = 0
            yield tuple(place)  # type: ignore[misc]
            place[2] += 1
        if ended == len(rows):
            places = [[reader, epoch + 1, 0] for reader, epoch, _ in places]


@dataclass
class Rank:
    progress: TrainingProgress
    source: IterableSource
    registry: StateRegistry


@dataclass
class Ranks:
    """The ranks of a job. Their states go through the bytes of a `StateRegistry`."""

    stream: IterableStream
    batch: int
    micro_batch: int = 2
    cursor: int = 0
    ranks: list[Rank] = field(default_factory=list)

    def form(self, world: int, state: list[Block] | None, cursor: int, lost: int = 0) -> None:
        """Another process group; `lost` of the ranks are new processes."""
        self.cursor = cursor
        survivors = self.ranks[: max(0, min(world, len(self.ranks)) - lost)]
        self.ranks = [*survivors, *(self._start() for _ in range(world - len(survivors)))]
        for number, rank in enumerate(self.ranks):
            rank.progress.sample_cursor = cursor
            if state is not None:
                rank.registry.read(BlocksSource(state), number)
            rank.registry.deliver()
            split = StepSplit(assign_step(self.batch, world, number, self.micro_batch))
            rank.source.begin(cursor, split, no_check)

    def _start(self) -> Rank:
        progress, registry = TrainingProgress(global_batch=self.batch), StateRegistry()
        source = IterableSource(self.stream, 0, progress, partial(registry.register, shared=True))
        return Rank(progress, source, registry)

    def read(self) -> tuple[list[Any], list[int]]:
        """The samples of the next step, and their numbers."""
        samples, numbers = [], []
        for number, rank in enumerate(self.ranks):
            for part in assign_step(self.batch, len(self.ranks), number, self.micro_batch):
                own, read = rank.source.read(self.cursor, part, is_last=False, check=no_check)
                assert len(read) == part.read_count
                samples += read[: part.count]
                numbers += own[: part.count]
        return samples, numbers

    def step(self) -> tuple[list[Any], list[int]]:
        read = self.read()
        self.cursor += self.batch
        for rank in self.ranks:
            rank.progress.sample_cursor = self.cursor
        return read

    def save(self) -> list[Block]:
        blocks = []
        for number, rank in enumerate(self.ranks):
            rank.registry.capture()
            packed = pack_block(rank.registry.ranges(number))
            data = bytearray(packed.index.nbytes)
            packed.copy_to(memoryview(data))
            blocks.append(
                Block(packed.index, data, json.dumps({"rank": number, "step": 1}).encode())
            )
        return blocks


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_order_is_the_same_at_any_world_size_and_through_rewinds(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5), "rows")
    endless, batch = data.draw(st.booleans(), "endless"), data.draw(st.integers(1, 9), "batch")
    options = {"rows": None} if endless else {}
    every = data.draw(st.integers(1, 9), "snapshot_every")
    replay = data.draw(st.booleans(), "replay")
    job = Ranks(make_stream(rows, snapshot_every=every, replay=replay, **options), batch)
    job.form(data.draw(st.sampled_from([1, 2, 3, 5]), "ranks"), None, 0)
    expected = list(islice(in_turn(rows, endless=endless), 40 * batch))
    mirrors = {0: None}
    for _ in range(data.draw(st.integers(5, 20), "steps")):
        step = job.cursor // batch
        samples, numbers = job.step()
        assert sorted(samples) == sorted(expected[step * batch : job.cursor])
        ordered = job.ranks[0].source._order.indices(step * batch, batch)
        assert numbers == ordered.tolist()
        if not endless:
            assert [(it % len(rows), it // len(rows)) for it in numbers] == [
                (reader, row) for reader, _, row in samples
            ]
        event = data.draw(st.sampled_from(["", "", "mirror", "fault", "resize", "lost"]), "event")
        if event in ("mirror", "resize"):
            mirrors[job.cursor] = job.save()
        if event == "lost":
            job.read()  # of a step that does not count
        if event in ("fault", "resize", "lost"):
            world = data.draw(st.sampled_from([1, 2, 3, 5]), "ranks")
            back = data.draw(st.sampled_from(sorted(mirrors)), "back")
            mirrors = {cursor: mirrors[cursor] for cursor in mirrors if cursor <= back}
            job.form(world, mirrors[back], back, lost=data.draw(st.integers(0, 1), "lost"))


def test_an_epoch_has_each_row_once_and_then_begins_anew() -> None:
    job = Ranks(make_stream([3, 9, 1, 5]), 6)
    job.form(3, None, 0)
    samples = [sample for _ in range(6) for sample in job.step()[0]]
    assert Counter(samples) == Counter(islice(in_turn([3, 9, 1, 5], endless=False), 36))
    assert Counter(it[1] for it in samples) == {0: 18, 1: 18}
    assert job.ranks[0].source.length == 18


@pytest.mark.parametrize("every", [1, 10, 64])
def test_fewer_rows_than_a_snapshot_interval_are_read_again(every: int) -> None:
    """And a reader is run by one rank, where the numbers allow it."""
    begun: list[tuple[int, int, int]] = []
    rows = [1000] * 6
    job = Ranks(make_stream(rows, begun, snapshot_every=every), 12)
    job.form(3, None, 0)
    for world, lost in ((3, 1), (2, 0), (1, 1), (3, 0)):
        for _ in range(37):
            job.step()
        assert len(begun) == 6, "one rank each"
        begun.clear()
        job.form(world, job.save(), job.cursor, lost)
        samples, _ = job.step()
        assert sorted({(reader, 0) for reader, _, _ in samples}) == [(it, 0) for it in range(6)]
        wanted = {reader: row for reader, _, row in reversed(samples)}
        again = {reader: wanted[reader] - row for reader, _, row in begun}
        assert len(again) == 6
        assert all(0 <= it < every for it in again.values()), again


def test_an_iteration_that_begins_anew_reads_nothing_again() -> None:
    begun: list[Any] = []
    made: list[Any] = []
    stream = make_stream([1000] * 2, begun, transform=lambda row: made.append(row) or row)
    progress = TrainingProgress(global_batch=4)
    source = IterableSource(stream, 0, progress, lambda *_: None)
    own = MicroBatches(progress, StepSplit(assign_step(4, 1, 0, 2)))
    loader = StepLoader(source, own, collate_fn=list)
    samples = []
    for _ in range(20):
        next(loader.steps(2))  # and reads ahead
        own.forget()
        for batch in loader.steps(1):
            samples += batch
        progress.sample_cursor += 4
        own.forget()
    assert Counter(samples) == Counter(islice(in_turn([1000] * 2, endless=False), 80))
    assert len(begun) == 2
    assert len(set(made)) == len(made) >= 80, "a transform may change its row"


class Node:
    """torchdata's protocol of a node: an iterator with `reset`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.reset()

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        self.next = 0 if initial_state is None else initial_state["next"]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def __iter__(self) -> Node:
        return self

    def __next__(self) -> int:
        if self.next == self.count:
            raise StopIteration
        self.next += 1
        return self.next - 1


class RestartingLoader(Node):
    """As torchdata's `Loader`: with a state of its end it begins again."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.loaded: dict[str, Any] | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state

    def __iter__(self) -> Node:
        self.reset(self.loaded)
        if self.next == self.count:
            self.reset()
        return self


def through_restarts(stream: IterableStream, batch: int, steps: int) -> list[Any]:
    """The samples of an epoch, with other ranks after every step."""
    job, samples = Ranks(stream, batch), []
    job.form(1, None, 0)
    for step in range(steps):
        samples += job.step()[0]
        job.form((2, 3, 1)[step % 3], job.save(), job.cursor, lost=step % 2)
    return samples


@pytest.mark.parametrize("kind", [Node, RestartingLoader])
@pytest.mark.parametrize("every", [1, 3])
def test_nodes_and_loaders_of_torchdata(kind: Any, every: int) -> None:
    stream = rayzero.data.iterable(lambda *_: kind(5), 2, snapshot_every=every)
    assert Counter(through_restarts(stream, 2, 10)) == Counter([*range(5)] * 4)


def hf_base(shards: int = 4) -> Any:
    source = datasets.Dataset.from_dict({"a": list(range(64))})
    return source.to_iterable_dataset(num_shards=shards)


HF_STEPS: dict[str, Callable[[], Any]] = {
    "plain": hf_base,
    "map": lambda: hf_base().map(lambda row: {"b": row["a"] * 2}),
    "filter": lambda: hf_base().filter(lambda row: row["a"] % 3 > 0),
    "batched": lambda: hf_base().map(lambda rows: {"b": rows["a"]}, batched=True, batch_size=5),
    "grown": lambda: hf_base().map(
        lambda rows: {"a": [it for it in rows["a"] for _ in range(2)]}, batched=True, batch_size=3
    ),
    "joined": lambda: datasets.concatenate_datasets([hf_base(2), hf_base(2)]),
    "mixed": lambda: datasets.interleave_datasets([hf_base(), hf_base()], [0.7, 0.3], seed=5),
    "skipped": lambda: hf_base().skip(3).take(9),
}


@pytest.mark.parametrize("name", HF_STEPS)
def test_hugging_face_datasets(name: str) -> None:
    dataset = HF_STEPS[name]()
    readers = dataset.num_shards
    parts = [list(dataset.shard(readers, reader)) for reader in range(readers)]
    stream = rayzero.data.iterable(dataset, rows=[len(part) for part in parts], snapshot_every=4)
    total = sum(map(len, parts))
    samples = through_restarts(stream, 8, total // 8)
    order = stream.order(8)
    expected = [parts[it % readers][it // readers] for it in order.indices(0, len(samples))]
    assert sorted(map(str, samples)) == sorted(map(str, expected))


def test_a_shuffle_buffer_is_refused_and_can_be_replayed() -> None:
    dataset = datasets.interleave_datasets([hf_base().shuffle(seed=3, buffer_size=8), hf_base()])
    with pytest.raises(ConfigError, match=r"shuffle.buffer_size.*\n.*\n.*blocks.*replay=True"):
        through_restarts(rayzero.data.iterable(dataset), 4, 1)
    shuffled = hf_base().shuffle(seed=3, buffer_size=8)
    stream = rayzero.data.iterable(shuffled, rows=16, replay=True)
    samples = [it["a"] for it in through_restarts(stream, 8, 8)]
    assert sorted(samples) == list(range(64))
    assert samples != sorted(samples)


def fail(stream: Any, steps: int = 3) -> None:
    through_restarts(stream, 4, steps)


def failing(reader: int, readers: int) -> Any:
    rows = Rows(reader, 100, [])

    def state_dict() -> Any:
        raise OSError("away")

    rows.state_dict = state_dict  # type: ignore[method-assign]
    return rows


def test_errors_name_reader_and_row() -> None:
    def broken(reader: int, readers: int) -> Any:
        node = Node(100)
        if reader:
            node.count = "3"  # type: ignore[assignment]
            node.state_dict = lambda: 1 // 0  # type: ignore[method-assign,assignment]
        return node

    for stream, match in (
        (make_stream([2, 5], rows=[3, 5]), "reader 0 has 2 rows in its epoch 0\n  allowed: 3, by"),
        (make_stream([4, 5], rows=[3, 5]), "reader 0 has more than 3 rows in its epoch 0"),
        (make_stream([5, 0], rows=None), "reader 1 has 0 rows in its epoch 0\n  allowed: one row"),
        (rayzero.data.iterable(lambda *_: iter([1]), 2), "no state_dict.*\n.*\n.*give it both"),
        (rayzero.data.iterable(lambda *_: 3, 2, replay=True), "row 0 of reader 0 cannot be read"),
        (rayzero.data.iterable(failing, 2, snapshot_every=3), "row 3 of reader 0.*OSError: away"),
    ):
        with pytest.raises((ConfigError, DataError), match=match):
            fail(stream)


def test_a_row_that_hangs_is_named_and_a_failed_one_is_read_again() -> None:
    release, made = threading.Event(), list[Node]()

    class Hangs(Node):
        def __next__(self) -> int:
            if self.next == 2:
                release.wait(60)
            if self.next == 3 and self is made[1]:
                raise OSError("once")
            return super().__next__()

    def make(reader: int, readers: int) -> Node:
        made.append(Hangs(100))
        return made[-1]

    stream = rayzero.data.iterable(make, 1, read_timeout_s=0.3)
    job = Ranks(stream, 4)
    job.form(1, None, 0)
    with pytest.raises(DataError, match=r"row 2 of reader 0 was not read within 0.3 s"):
        job.step()

    def stop() -> None:
        raise EngineError("stopped")

    part = assign_step(4, 1, 0, 4)[0]
    with pytest.raises(EngineError, match="stopped"):
        job.ranks[0].source.read(0, part, is_last=True, check=stop)
    release.set()
    with pytest.raises(DataError, match="OSError: once"):
        job.read()
    assert job.step()[0] == [*range(job.cursor - 4, job.cursor)]


def test_an_iteration_that_was_closed_reads_no_further_row() -> None:
    """Its readers are the next one's, also if a row took longer than closing waits."""
    job = Ranks(make_stream([20]), 6)
    job.form(1, None, 0)
    source = job.ranks[0].source

    def check() -> None:
        if source._readers and source._readers[0].next_row == 3:
            raise EngineError("closed")

    with pytest.raises(EngineError, match="closed"):
        source.read(0, assign_step(6, 1, 0, 6)[0], is_last=True, check=check)
    assert source._readers[0].next_row == 3


@pytest.mark.parametrize("at_snapshot", [False, True])
def test_an_iteration_that_ends_drops_no_loaded_snapshot(at_snapshot: bool) -> None:
    """A state is loaded while a thread still reads ahead of a later step."""
    state, loaded = dict[str, Any](), []

    def load(is_due: bool) -> None:
        if is_due:
            source._set([state])
            loaded.append(source._snapshots[0])

    job = Ranks(make_stream([100], snapshot_every=1), 4)
    job.form(1, None, 0)
    source = job.ranks[0].source
    job.step()
    state |= source._get()

    rows_before, read_row = source._order.rows_before, source._read_row

    def read_and_load(number: int, row: int, check: Callable[[], None]) -> Any:
        values = read_row(number, row, check)
        load(row == 13)
        return values

    def load_and_count(position: int) -> Any:
        load(position == 8)  # one step before that which is read
        return rows_before(position)

    if at_snapshot:
        source._order.rows_before = load_and_count  # type: ignore[method-assign]
    else:
        source._read_row = read_and_load  # type: ignore[method-assign]
    job.step()
    job.step()
    job.read()
    assert loaded
    assert source._snapshots[0] == loaded[-1]
    assert loaded[-1][0].row == 4


def test_state_of_other_readers_is_refused() -> None:
    job = Ranks(make_stream([5, 5]), 2)
    job.form(1, None, 0)
    job.step()
    for other, named in (
        (make_stream([5] * 3), "readers: 2; now: 3"),
        (make_stream([5, 6]), "5, 6"),
    ):
        with pytest.raises(DataError, match=named):
            Ranks(other, 2).form(1, job.save(), 2)


@pytest.mark.parametrize(
    ("source", "options", "match"),
    [
        (Node(3), {}, r"a function \(reader, readers\)"),
        (Node, {}, "has None readers"),
        (Node, {"readers": 0}, "readers of iterable"),
        (Node, {"readers": 2, "rows": [1]}, "rows of iterable"),
        (Node, {"readers": 2, "rows": -1}, "rows of iterable"),
        (Node, {"readers": 2, "rows": 1.5}, "rows of iterable"),
        (Node, {"readers": "2"}, "has '2' readers"),
        (hf_base(), {"readers": 5}, "at most 4, the shards"),
    ],
)
def test_arguments_of_no_use_are_refused(source: Any, options: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        rayzero.data.iterable(source, **options)


def train(rank: int, world: int, folder: str, steps: int) -> list[Any]:
    torch.manual_seed(0)
    rows = [40, 30, 41, 39]
    as_tensor = lambda it: torch.tensor([float(it[0] + 4 * it[2])])  # noqa: E731
    stream = make_stream(rows, transform=as_tensor)
    engine, _, loader, _ = rayzero.initialize(
        model=torch.nn.Linear(1, 1),
        training_data=stream,
        config={"train_batch_size": 6, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}},
    )
    assert loader is not None
    if steps:
        engine.load_checkpoint(folder)
    seen, counted = [], Counter[str]()
    for batch in loader.until(steps + 5):
        seen += batch[:, 0].tolist()
        engine.backward(engine(batch).square().mean())
        engine.step()
        counted += engine.internals.meter.step_work.take_stream_counts()["iterable"]
    assert counted["samples"] == len(seen) <= counted["hits"] + counted["waits"]
    engine.save_checkpoint(folder)
    assert engine.state.complete_on_rank == (world == 1)
    engine.close()
    return seen


def test_checkpoints_continue_at_any_world_size(tmp_path: Any) -> None:
    seen = []
    for number, world in enumerate((1, 3, 2)):
        for own in run_ranks(world, train, str(tmp_path), 5 * number):
            seen += own
    expected = islice(in_turn([40, 30, 41, 39], endless=False), 90)
    assert Counter(seen) == Counter(reader + 4.0 * row for reader, _, row in expected)

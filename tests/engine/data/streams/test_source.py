"""Streams through the loader: one order at any number of ranks, the cache, resuming, errors."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rayzero
import rayzero.data
from rayzero.engine.data.sampling import StepSplit, assign_step
from rayzero.engine.data.streams.rows import BlockInMemory, BlockRows, RowBatch
from rayzero.engine.errors import ConfigError, DataError, EngineError
from tests.engine.data.streams.memory import MemorySource, make_source, read_step

COUNTS = [5, 3, 8, 1, 6, 7, 2, 4]


def block_threads() -> list[threading.Thread]:
    return [it for it in threading.enumerate() if it.name in ("rayzero-blocks", "rayzero-prefetch")]


@pytest.fixture(autouse=True, scope="module")
def no_leaked_threads() -> Iterator[None]:
    yield
    gc.collect()
    for thread in block_threads():
        thread.join(5)
    assert block_threads() == []


def no_check() -> None:
    pass


def make_mix() -> Any:
    web, code = MemorySource(COUNTS, "web"), MemorySource([4] * 5, "code")
    return rayzero.data.mix(
        {"web": (rayzero.data.stream(web, 3), 0.75), "code": (code, 0.25)},
        changes={2: {"code": 1.0}},
        max_epochs={"code": 2},
    )


@settings(max_examples=15, deadline=None)
@given(
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 3),
    st.lists(st.sampled_from([1, 2, 3, 5]), min_size=3, max_size=8),
)
def test_order_is_the_same_at_any_world_size(
    mixed: bool, batch: int, micro_batch: int, worlds: list[int]
) -> None:
    """Each step on another number of ranks, some as after a repair: all sources are new."""
    stream = make_mix() if mixed else rayzero.data.stream(MemorySource(COUNTS, "web"), 3)
    order = stream.order(7, batch)
    source = make_source(stream, batch, seed=7)
    texts = []
    for step, world in enumerate(worlds):
        if step % 3 == 2:
            source = make_source(stream, batch, seed=7)
        texts += [it["text"] for it in read_step(source, step * batch, batch, micro_batch, world)]
    places = order.places(0, batch * len(worlds))
    expected = [
        f"{part.source.name}-{part.source.counts[:block].sum() + row}"
        for number, block, row in zip(places.sources, places.blocks, places.rows, strict=True)
        for part in [stream.parts[number]]
    ]
    assert texts == expected
    if not mixed:
        whole = Counter(texts[: sum(COUNTS)])
        assert max(whole.values()) == 1


def test_an_epoch_of_a_stream_has_each_row_once() -> None:
    source = make_source(rayzero.data.stream(MemorySource(COUNTS), 3), 6)
    rows = [it["row"] for step in range(6) for it in read_step(source, step * 6, 6, 2, 3)]
    assert sorted(rows) == list(range(36))


def test_blocks_of_a_window_are_read_once_and_ahead() -> None:
    memory = MemorySource([50] * 12)
    source = make_source(rayzero.data.stream(memory, 4), 10)
    source.begin(0, StepSplit(assign_step(10, 1, 0, 10)), no_check)
    part = assign_step(10, 1, 0, 10)[0]
    for cursor in range(0, 600, 10):
        source.read(cursor, part, is_last=True, check=no_check)
    assert set(memory.reads.values()) == {1}
    assert source.cache.take_counts()[0, "hits"] > 100


def test_resume_reads_at_most_its_window() -> None:
    memory = MemorySource([50] * 40)
    source = make_source(rayzero.data.stream(memory, 4, threads=1), 10)
    part = assign_step(10, 1, 0, 10)[0]
    source.begin(1000, StepSplit((part,)), no_check)
    source.read(1000, part, is_last=True, check=no_check)
    order = source._order.orders[0]
    window = order.window_of(int(order.locate(np.array([1000]))[0][0]))
    allowed = {*order.blocks_of_window(window, 0, 1), *order.blocks_of_window(window + 1, 0, 1)}
    assert set(memory.reads) <= allowed


def test_memory_is_bounded_and_what_does_not_fit_is_read_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = MemorySource([40] * 16, width=1000)
    block_bytes = memory.read(0).get_total_buffer_size()
    limit = 5 * block_bytes
    source = make_source(rayzero.data.stream(memory, 8, cache_bytes=limit), 16)
    part = assign_step(16, 1, 0, 16)[0]
    source.begin(0, StepSplit((part,)), no_check)
    rows = []
    for cursor in range(0, 640, 16):
        rows += [it["row"] for it in source.read(cursor, part, is_last=True, check=no_check)[1]]
    assert sorted(rows) == list(range(640))
    assert source.cache.counters.peak_bytes <= 1.1 * limit
    assert "do not fit in cache_bytes" in caplog.text
    assert caplog.text.count("do not fit") == 1


def test_sources_share_a_small_cache() -> None:
    """The current window of each is read before the next one of another: each block once."""
    web, code = (MemorySource([40] * 16, name, width=1000) for name in ("web", "code"))
    limit = 13 * web.read(0).get_total_buffer_size()
    web.reads.clear()
    parts = {it.name: (rayzero.data.stream(it, 4), 0.5) for it in (web, code)}
    source = make_source(rayzero.data.mix(parts, cache_bytes=limit), 16)
    part = assign_step(16, 1, 0, 16)[0]
    source.begin(0, StepSplit((part,)), no_check)
    rows = []
    for cursor in range(0, 960, 16):  # three windows of four: the next epoch is not read ahead
        rows += source.read(cursor, part, is_last=True, check=no_check)[0]
    assert len(set(rows)) == 960
    assert set(web.reads.values()) | set(code.reads.values()) == {1}
    assert source.cache.counters.peak_bytes <= 1.1 * limit


def make_block(kind: str, number: int) -> pa.Table:
    """8 MB: 2048 rows of 4 kB."""
    rng = np.random.default_rng(number)
    if kind == "strings":
        return pa.table({"text": [rng.bytes(2048).hex() for _ in range(2048)]})
    tokens = pa.array(rng.integers(0, 2**31, 2048 * 1024, dtype=np.int32))
    return pa.table({"ids": pa.FixedSizeListArray.from_arrays(tokens, 1024)})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["strings", "lists", "json"])
def test_private_memory_is_bounded(kind: str, tmp_path: Path) -> None:
    """Of a process, with what reads and allocators take."""
    path = tmp_path / ("a.jsonl" if kind == "json" else "a.parquet")
    if kind == "json":
        rng = np.random.default_rng(0)
        texts = [json.dumps({"text": rng.bytes(2048).hex()}) for _ in range(2048)]
        path.write_text("\n".join(texts * 12))
    else:
        with pq.ParquetWriter(path, make_block(kind, 0).schema) as writer:
            for number in range(12):  # more than the limit
                writer.write_table(make_block(kind, number))
    limit = 64 << 20
    command = [sys.executable, "-m", "tests.engine.data.streams.measure_memory"]
    run = subprocess.run([*command, path, str(limit)], stdout=subprocess.PIPE, check=True)
    assert 0.2 * limit < int(run.stdout) <= 1.1 * limit


def test_a_block_larger_than_the_limit_is_refused() -> None:
    source = make_source(rayzero.data.stream(MemorySource([50]), cache_bytes=100), 2)
    with pytest.raises(DataError, match="cache_bytes"):
        source.read(0, assign_step(2, 1, 0, 2)[0], is_last=True, check=no_check)


def test_a_waiting_reader_can_be_stopped() -> None:
    memory, release, calls = MemorySource([50]), threading.Event(), []

    def check() -> None:
        calls.append(1)
        if len(calls) > 2:
            raise EngineError("stopped")

    memory.before_read = lambda block: release.wait(60) and None
    source = make_source(rayzero.data.stream(memory), 2)
    part = assign_step(2, 1, 0, 2)[0]
    with pytest.raises(EngineError, match="stopped"):
        source.read(0, part, is_last=True, check=check)
    release.set()
    assert len(source.read(0, part, is_last=True, check=no_check)[1]) == 2
    assert memory.reads == {0: 1}


def test_a_block_that_takes_too_long_is_named() -> None:
    memory, release = MemorySource([50]), threading.Event()
    memory.before_read = lambda block: release.wait(60) and None
    source = make_source(rayzero.data.stream(memory, read_timeout_s=0.1), 2)
    with pytest.raises(DataError, match=r"block 0 of 'memory' \(memory block 0\) was not read"):
        source.read(0, assign_step(2, 1, 0, 2)[0], is_last=True, check=no_check)
    release.set()


def test_errors_name_source_block_and_row_and_a_read_is_tried_again() -> None:
    memory, failures = MemorySource([50]), [OSError("storage is away")]
    memory.before_read = lambda block: (_ for _ in ()).throw(failures.pop()) if failures else None
    source = make_source(rayzero.data.stream(memory, transform=lambda it: 1 // it["row"]), 50)
    with pytest.raises(DataError, match=r"block 0\) could not be read: OSError: storage is away"):
        read_step(source, 0, 50, 50, 1)
    with pytest.raises(DataError, match=r"row 0 of block 0 of 'memory' \(memory block 0\)"):
        read_step(source, 0, 50, 50, 1)


@pytest.mark.parametrize(
    ("block", "match"),
    [
        (pa.table({"row": [1]}), "has 1 rows, and had 50"),
        ({"row": [1]}, r"block 0\) could not be read: AttributeError: 'dict'"),
        (pa.table([[1] * 50] * 2, ["x", "x"]), r"block 0\) could not be read: KeyError"),
    ],
)
def test_what_is_no_block_of_these_rows_is_refused(block: Any, match: str) -> None:
    memory = MemorySource([50])
    source = make_source(rayzero.data.stream(memory), 2)
    memory.read = lambda number: block  # type: ignore[method-assign]
    with pytest.raises(DataError, match=match):
        source.read(0, assign_step(2, 1, 0, 2)[0], is_last=True, check=no_check)


class Registered:
    def __call__(self, name: str, get: Any, set: Any) -> None:  # noqa: A002
        self.get, self.set = get, set


def test_state_of_another_stream_is_refused_and_its_batch_kept() -> None:
    saved, loaded = Registered(), Registered()
    first = make_source(rayzero.data.stream(MemorySource(COUNTS), 3), 6, register=saved)
    second = make_source(rayzero.data.stream(MemorySource(COUNTS), 3), 4, register=loaded)
    loaded.set(saved.get())
    assert (second._order.indices(0, 60) == first._order.indices(0, 60)).all()
    assert loaded.get() == saved.get()
    for other, named in (
        (rayzero.data.stream(MemorySource(COUNTS), 4), "shuffle_window of 'memory': 3; now: 4"),
        (rayzero.data.stream(MemorySource([*COUNTS, 1]), 3), "8 and 36; now: 9 and 37"),
        (make_mix(), "blocks and rows of 'memory'"),
    ):
        make_source(other, 6, register=loaded)
        with pytest.raises(DataError, match=named):
            loaded.set(saved.get())


def test_each_source_of_a_mixture_is_compared_also_if_two_have_one_name() -> None:
    """As those of `from_ray` and `from_hf` may have. Their sequence is compared, too."""
    weight = 1.0
    one, two, changed = (MemorySource([4] * count, "ray") for count in (3, 5, 4))
    saved, loaded = Registered(), Registered()
    make_source(rayzero.data.mix({"a": (one, weight), "b": (two, weight)}), 6, register=saved)
    for sources, named in (
        ({"a": changed, "b": two}, "blocks and rows of 'a': 3 and 12; now: 4 and 16"),
        ({"b": two, "a": one}, "sources: a, b; now: b, a"),
    ):
        mixture = rayzero.data.mix({name: (it, weight) for name, it in sources.items()})
        make_source(mixture, 6, register=loaded)
        with pytest.raises(DataError, match=named):
            loaded.set(saved.get())


def test_columns_become_numbers_arrays_and_text() -> None:
    table = pa.table(
        {
            "ids": pa.array([[1, 2], [3], None], pa.list_(pa.int32())),
            "fixed": pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32(), 2)),
            "text": ["a", "b", None],
            "gaps": pa.array([[1, None]] * 3, pa.list_(pa.int64())),
        }
    )
    columns = {
        name: BlockRows(BlockInMemory(table), np.arange(3), np.arange(3)).column(name)
        for name in table.column_names
    }
    ids = columns["ids"]
    assert ids[0].dtype == np.int32
    assert [None if it is None else it.tolist() for it in ids] == [[1, 2], [3], None]
    assert columns["fixed"][1].tolist() == [1.0, 2.0]
    assert columns["text"] == ["a", "b", None]
    assert columns["gaps"][0] == [1, None]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_texts_are_those_of_pyarrow(kind: pa.DataType) -> None:
    for texts in (["left out", "", "ä", "two words", ""], ["", "", ""]):
        table = pa.table({"text": pa.array(texts, pa.string()).cast(kind)}).slice(1)
        rows = np.array([1, 0, len(texts) - 2])
        column = BlockRows(BlockInMemory(table), rows, np.arange(3)).column("text")
        assert column == table["text"].take(pa.array(rows)).to_pylist()


def many_columns(rows: int, seed: int, lists: pa.DataType) -> pa.Table:
    numbers = np.random.default_rng(seed).integers(0, 100, rows * 4)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(numbers.astype(np.int32)), 4)
    halves = pa.FixedSizeListArray.from_arrays(pa.array(numbers.astype(np.float16)), 4)
    return pa.table(
        {
            "lists": fixed.cast(lists),
            "halves": halves,
            "tensors": pa.FixedShapeTensorArray.from_numpy_ndarray(numbers.reshape(rows, 2, 2)),
            "small": pa.array(numbers[:rows].astype(np.uint16)),
            "single": pa.array(numbers[:rows].astype(np.float32)),
            "flag": pa.array(numbers[:rows] > 50),
            "text": [f"text {it}" for it in numbers[:rows]],
            "raw": [bytes([it]) for it in numbers[:rows]],
        }
    )


@pytest.mark.parametrize("lists", [pa.list_(pa.int32()), pa.list_(pa.int32(), 4)])
@pytest.mark.parametrize("positions", [([0, 1, 2], [3, 4]), ([0, 2, 4], [1, 3])])
def test_a_batch_is_what_torch_collates(lists: pa.DataType, positions: Any) -> None:
    """Of two blocks, one of which is a part of a table; adjacent, or mixed."""
    first = BlockInMemory(many_columns(10, 1, lists))
    second = BlockInMemory(many_columns(20, 2, lists).slice(4, 10))
    parts = [
        BlockRows(first, np.array([3, 1, 9]), np.array(positions[0])),
        BlockRows(second, np.array([0, 4]), np.array(positions[1])),
    ]
    batch = RowBatch(parts)
    rows = dict(zip(positions[0] + positions[1], [3, 1, 9, 4, 8], strict=True))
    made, expected = batch.collate(), torch.utils.data.default_collate(list(batch))
    assert made.keys() == expected.keys() == set(first.table.column_names)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(made[name], value, rtol=0, atol=0)
        else:
            assert made[name] == value
    plain = (
        many_columns(10, 1, lists)["small"].to_pylist(),
        many_columns(20, 2, lists)["small"].to_pylist(),
    )
    assert made["small"].tolist() == [plain[it in positions[1]][rows[it]] for it in range(5)]


def test_rows_that_are_no_batch_are_refused_by_torch() -> None:
    table = pa.table({"ids": pa.array([[1, 2], [3]])})
    batch = RowBatch([BlockRows(BlockInMemory(table), np.arange(2), np.arange(2))])
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        batch.collate()


def stream_of(source: Any = None, **options: Any) -> Any:
    return rayzero.data.stream(MemorySource([9]) if source is None else source, **options)


def mix_of(*entry: Any, **options: Any) -> Any:
    return rayzero.data.mix({"web": entry or (MemorySource([9]), 1)}, **options)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        *(
            (lambda it=it, bad=bad: stream_of(**{it: bad}), it)
            for it in ("shuffle_window", "cache_bytes", "threads", "read_timeout_s")
            for bad in (0, "8")
        ),
        (lambda: stream_of(shuffle_window=2.5), r"shuffle_window of stream\('memory'\) is 2\.5"),
        (lambda: stream_of("web/*.parquet"), r"stream\(\) got a str.*\n.*\n.*blocks\(paths\)"),
        (lambda: stream_of(stream_of()), "got a StreamDataset"),
        (lambda: rayzero.data.map_blocks("web", len), r"map_blocks\(\) got a str"),
        (lambda: mix_of(changes={3: {"webb": 1.0}}), "did you mean 'web'"),
        (lambda: mix_of(max_epochs={"web": 0}), "max_epochs of 'web' in a mixture is 0"),
        (lambda: mix_of(max_epochs={"web": float("nan")}), "mixture is nan"),
        (lambda: mix_of(max_epochs={"web": "3"}), "mixture is '3'"),
        (lambda: mix_of(max_epochs=3), "max_epochs of a mixture is 3"),
        (lambda: mix_of(changes={-1: {"web": 1.0}}), "changes of a mixture is {-1"),
        (lambda: mix_of(changes={1.5: {"web": 1.0}}), "changes of a mixture is {1"),
        (lambda: mix_of(changes=[5]), r"changes of a mixture is \[5\]"),
        (lambda: mix_of(changes={3: 0.5}), "weight of a mixture is 0"),
        (lambda: mix_of(changes={3: {"web": float("inf")}}), "mixture is inf"),
        (lambda: mix_of(MemorySource([9]), -1), "weight of 'web' in a mixture is -1"),
        (lambda: mix_of(MemorySource([9]), "1"), "weight of 'web' in a mixture is '1'"),
        (lambda: mix_of(0.5, MemorySource([9])), "got a float"),
        (lambda: mix_of("web", 0.5), "got a str"),
        (lambda: mix_of(MemorySource([9])), r"\(source, weight\)"),
        (lambda: mix_of(mix_of(), 1), "is a mixture"),
        (lambda: rayzero.data.mix({"web": MemorySource([9])}), "got a MemorySource for 'web'"),
        (lambda: rayzero.data.mix({}), "no sources"),
        (lambda: rayzero.data.mix([(MemorySource([9]), 1)]), "no sources"),
    ],
)
def test_mistakes_are_named(make: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


@pytest.mark.parametrize("world", [1, 3])
def test_counts_of_a_step_are_those_of_its_rows(world: int) -> None:
    """Of all ranks together, which have 10 samples a step: the third one is of `code` alone."""
    secret = MemorySource([30] * 4, "s3://key:secret@bucket/web")
    code = MemorySource([20] * 4, "code")
    stream = rayzero.data.mix(
        {secret.name: (secret, 0.8), "code": (code, 0.2)}, changes={2: {secret.name: 0}}
    )
    seen: list[Counter[tuple[str, str]]] = [Counter() for _ in range(3)]
    for rank in range(world):
        split = StepSplit(assign_step(10, world, rank, 2))
        source = make_source(stream, 10)
        source.begin(0, split, no_check)
        for step, counts in enumerate(seen):
            for part in split:
                source.read(step * 10, part, is_last=False, check=no_check)
            source._progress.sample_cursor += 10  # as a finished step does
            for name, of_source in source.take_counts().items():
                counts.update({(name, kind): number for kind, number in of_source.items()})
    web = "s3://***@bucket/web"
    assert [(it[web, "samples"], it["code", "samples"]) for it in seen] == [(8, 2), (8, 2), (0, 10)]
    total = sum(seen, Counter())
    assert {name for name, _ in total} == {web, "code"}
    for memory, name in ((secret, web), (code, "code")):
        assert total[name, "blocks"] <= sum(memory.reads.values())
        uses = total[name, "hits"] + total[name, "waits"]
        assert uses > 0
        row = memory.read(0).get_total_buffer_size() / int(memory.counts[0])
        assert total[name, "bytes"] == pytest.approx(
            total[name, "blocks"] * memory.counts[0] * row, rel=0.1
        )


def test_engine_trains_on_a_stream() -> None:
    """Against plain torch over the rows of the order."""
    config = {
        "gradient_clipping": 0,
        "train_batch_size": 6,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    }
    stream = rayzero.data.stream(
        MemorySource(COUNTS), 3, transform=lambda it: torch.tensor([it["row"] / 36])
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    plain = torch.nn.Linear(1, 1)
    plain.load_state_dict(model.state_dict())
    engine, _, loader, _ = rayzero.initialize(model=model, training_data=stream, config=config)
    for batch in loader:
        engine.backward(engine(batch).square().mean())
        engine.step()
    assert engine.global_steps == 6
    assert engine.internals.meter.step_work.take_stream_counts()["memory"]["samples"] == 6
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for step in range(6):
        rows = torch.tensor(stream.order(0, 6).indices(step * 6, 6) / 36).float()[:, None]
        optimizer.zero_grad()
        plain(rows).square().mean().backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(engine.state_dict()[name], value)
    engine.close()


@pytest.mark.parametrize(
    ("is_local", "ranks", "threads"), [(True, 2, 2), (True, 8, 1), (False, 8, 3)]
)
def test_local_sources_have_no_more_threads_than_cores(
    is_local: bool, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    memory = MemorySource([4])
    memory.is_local = is_local  # type: ignore[attr-defined]
    assert make_source(rayzero.data.stream(memory, threads=3), 2).cache._threads == threads

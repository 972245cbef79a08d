"""A stream as the dataset of torch's DataLoader: its positions, in the order of the stream."""

from __future__ import annotations

import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

import rayzero.data
from rayzero.data import StreamSampler
from rayzero.engine.data.streams.positions import check_sampler
from rayzero.engine.errors import ConfigError, DataError
from rayzero.engine.session import HostSession, use_session
from rayzero.engine.state.registry import StateRegistry
from tests.engine.data.streams.memory import MemorySource

COUNTS = [5, 3, 8, 1, 6, 7, 2, 4]
SAMPLES = sum(COUNTS)


def make_stream() -> Any:
    return rayzero.data.stream(MemorySource(COUNTS, "web"), 3, transform=dict)


def make_mix() -> Any:
    web, code = MemorySource(COUNTS, "web"), MemorySource([4] * 5, "code")
    return rayzero.data.mix({"web": (rayzero.data.stream(web, 3), 0.7), "code": (code, 0.3)})


def texts(stream: Any, start: int, count: int, seed: int = 0) -> list[str]:
    """By the order alone."""
    places = stream.order(seed, 1).places(start, count)
    starts = [part.source.counts.cumsum() - part.source.counts for part in stream.parts]
    rows = zip(places.sources.tolist(), places.blocks.tolist(), places.rows.tolist(), strict=True)
    return [f"{stream.parts[it].source.name}-{starts[it][block] + row}" for it, block, row in rows]


def read(loader: Any) -> list[str]:
    return [text for batch in loader for text in batch["text"]]


@pytest.mark.parametrize("make", [make_stream, make_mix])
@pytest.mark.parametrize("processes", [0, 2])
def test_dataloader_reads_the_positions(make: Any, processes: int) -> None:
    stream = make()
    loader: Any = DataLoader(stream, batch_size=4, num_workers=processes)
    assert read(loader) == texts(stream, 0, len(stream))
    assert [it["text"] for it in stream] == texts(stream, 0, len(stream))
    if make is make_stream:
        assert sorted(read(loader)) == sorted(f"web-{number}" for number in range(SAMPLES))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_sampler_divides_each_epoch(ranks: int) -> None:
    stream = make_stream()
    for epoch in (0, 2):
        parts = []
        for rank in range(ranks):
            sampler = StreamSampler(stream, ranks, rank)
            sampler.set_epoch(epoch)
            plain = DistributedSampler(range(SAMPLES), ranks, rank, shuffle=False)
            assert [*sampler] == [epoch * SAMPLES + number for number in plain]
            assert len(sampler) == len(plain)
            parts.append(read(DataLoader(stream, batch_size=3, sampler=sampler)))
        joined = [*chain.from_iterable(zip(*parts, strict=True))]
        expected = texts(stream, epoch * SAMPLES, SAMPLES)
        assert joined == [*expected, *expected][: len(joined)]


def test_seed_is_the_jobs_where_that_is_not_known_too(tmp_path: Path) -> None:
    """In a process or a thread that was given the stream."""
    pyarrow.parquet.write_table(
        pa.table({"row": range(SAMPLES)}), tmp_path / "a.parquet", row_group_size=4
    )
    stream, session = (
        rayzero.data.stream(rayzero.data.blocks(f"{tmp_path}/a.parquet")),
        HostSession(),
    )
    elsewhere = [it["row"] for it in stream]
    session.seed = 5
    with use_session(session):
        jobs = [it["row"] for it in stream]
        assert [*range(SAMPLES)] == sorted(jobs)
        sent = pickle.dumps(stream)
    assert [it["row"] for it in pickle.loads(sent)] == jobs != elsewhere
    with use_session(HostSession()):
        assert [it["row"] for it in pickle.loads(sent)] == elsewhere


def test_another_stream_is_refused_by_the_state() -> None:
    registry = StateRegistry()
    make_stream().keep_identity(registry.register)
    saved = registry._entries["rayzero.stream"].get()
    for window in (3, 4):
        stream = rayzero.data.stream(MemorySource(COUNTS, "web"), window)
        other = StateRegistry()
        other._restored = {"rayzero.stream": saved}
        if window == 3:
            stream.keep_identity(other.register)
            assert read(DataLoader(stream, batch_size=4)) == texts(stream, 0, SAMPLES)
        else:
            with pytest.raises(DataError, match="shuffle_window"):
                stream.keep_identity(other.register)


def test_random_order_is_refused() -> None:
    stream = make_stream()
    for wrong in (
        DataLoader(stream, shuffle=True),
        DataLoader(stream, sampler=DistributedSampler(stream, 2, 0)),
    ):
        with pytest.raises(ConfigError, match="shuffles a stream"):
            check_sampler(wrong)
    for right in (
        DataLoader(stream),
        DataLoader(stream, sampler=StreamSampler(stream)),
        DataLoader(stream, sampler=DistributedSampler(stream, 2, 0, shuffle=False)),
        DataLoader(stream, batch_sampler=BatchSampler(SequentialSampler(stream), 2, False)),
        DataLoader([1, 2], shuffle=True),  # type: ignore[arg-type]
    ):
        check_sampler(right)
    with pytest.raises(IndexError, match="position -1"):
        stream[-1]
    with pytest.raises(ConfigError, match=r"got a MemorySource.*\n.*\n.*data\.stream\(source\)"):
        StreamSampler(MemorySource([1]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"got a MemorySource.*\n.*\n.*data\.stream\(source\)"):
        check_sampler(DataLoader(MemorySource([1])))  # type: ignore[arg-type]

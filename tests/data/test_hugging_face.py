"""Datasets of `datasets` as blocks, against the datasets themselves."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator

import pytest

from rayzero.data import from_hf, stream
from rayzero.engine.data.streams.block import BlockSource
from rayzero.engine.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")


def read_rows(source: BlockSource) -> list[dict]:
    tables = [source.read(block) for block in range(len(source.counts))]
    assert [len(table) for table in tables] == source.counts.tolist()
    return [row for table in tables for row in table.to_pylist()]


def numbers(count: int = 25) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"n": list(range(count)), "t": list(map(str, range(count)))})


def generate(sizes: list[int]) -> Iterator[dict]:
    for size in sizes:
        for number in range(size):
            yield {"size": size, "number": number}


@pytest.mark.parametrize("rows_per_block", [1, 7, 25, 100])
def test_ranges_of_a_dataset(rows_per_block: int) -> None:
    for dataset in (
        numbers(),
        numbers().shuffle(seed=1),
        numbers().filter(lambda row: row["n"] % 3 == 0),
        numbers().with_format("torch", columns=["t"]),
    ):
        source = from_hf(dataset, rows_per_block)
        columns = dataset.format["columns"]
        assert read_rows(source) == dataset.with_format(None).select_columns(columns).to_list()
        assert len(source.counts) == -(-len(dataset) // rows_per_block)
        assert read_rows(pickle.loads(pickle.dumps(source))) == read_rows(source)


def test_fingerprint_follows_the_rows() -> None:
    first = from_hf(numbers(), 10).fingerprint
    assert from_hf(numbers(), 10).fingerprint == first
    others = [numbers(), numbers(24), numbers().shuffle(seed=1), numbers().remove_columns("t")]
    sizes = [9, 10, 10, 10]
    prints = {from_hf(it, rows).fingerprint for it, rows in zip(others, sizes, strict=True)}
    assert len(prints | {first}) == 5


def test_shards_of_an_iterable() -> None:
    dataset = datasets.IterableDataset.from_generator(generate, gen_kwargs={"sizes": [3, 0, 1, 5]})
    source = from_hf(dataset)
    assert source.counts.tolist() == [3, 1, 5]
    assert read_rows(source) == list(dataset)
    assert source.read(2).to_pylist() == [{"size": 5, "number": number} for number in range(5)]
    assert "shard 3 of 4" in source.describe(2)
    known = from_hf(dataset, counts=source.shard_counts)
    assert known.fingerprint == source.fingerprint
    mapped = numbers().to_iterable_dataset(num_shards=4).map(lambda row: {"n": row["n"] * 2})
    assert read_rows(from_hf(mapped)) == list(mapped)


def test_fingerprint_of_shards_follows_rows_at_their_beginning() -> None:
    """Of each of three shards: the oracle is what differs in it."""

    def fingerprint(shard: int | None, row: int = 0) -> str:
        rows = [{"n": it, "t": [str(it)]} for it in range(30)]
        if shard is not None:
            rows[10 * shard + row]["t"] = ["other"]
        dataset = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
        return from_hf(dataset, counts=[10] * 3).fingerprint

    assert fingerprint(None) == fingerprint(None)
    changed = [fingerprint(shard, row) for shard in range(3) for row in (0, 9)]
    assert len({fingerprint(None), *changed}) == 7


def test_shard_with_other_rows_is_named() -> None:
    dataset = datasets.IterableDataset.from_generator(generate, gen_kwargs={"sizes": [3, 5]})
    for wrong in (4, 6):
        with pytest.raises(DataError, match=rf"shard 1 of 2\) has 5 rows.* had {wrong}"):
            list(stream(from_hf(dataset, counts=[3, wrong])))


def test_row_that_raises_is_named() -> None:
    def fail(row: dict) -> dict:
        raise ValueError("bad row")

    with pytest.raises(
        DataError, match=r"shard 0, row 0 or later cannot be read: ValueError: bad row"
    ):
        from_hf(numbers().to_iterable_dataset().map(fail))


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = numbers().to_iterable_dataset(num_shards=2)
    for dataset, message in [
        (shards.shuffle(buffer_size=3), "rayzero.data.stream shuffles"),
        (shards.take(3), "take"),
        (shards.skip(3).map(lambda row: row), "skip"),
        (numbers().with_transform(lambda rows: rows), "transform"),
        (datasets.DatasetDict(), "choose a split"),
    ]:
        with pytest.raises(ConfigError, match=message):
            from_hf(dataset)
    changing = numbers().to_iterable_dataset().map(lambda row: {"x": time.monotonic_ns()})
    with pytest.raises(ConfigError, match="shard 0 of hf has other rows each time"):
        _ = from_hf(changing).fingerprint
    monkeypatch.setattr("rayzero.data.hugging_face.MAX_SHARD_ROWS", 30)
    with pytest.raises(ConfigError, match="more than 30 rows, or no end"):
        from_hf(shards.repeat(None))
    with pytest.raises(ConfigError, match="1 counts are given"):
        from_hf(shards, counts=[3])
    with pytest.raises(DataError, match="no rows"):
        from_hf(numbers(0))

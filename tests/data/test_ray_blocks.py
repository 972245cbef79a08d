"""Ray datasets as blocks, against the datasets themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import ray

import rayzero.data
from rayzero.data import PackedBlocks, from_ray
from rayzero.engine.errors import ConfigError, DataError
from rayzero.orchestrator.cluster.connect import connect
from rayzero.orchestrator.cluster.local_cluster import LocalCluster
from tests.engine.data.streams.exactness import check_through_faults
from tests.engine.data.streams.memory import make_source, read_step

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    cluster = connect("local", LocalCluster({}))
    yield
    cluster.close()


def slow_first(row: dict) -> dict:
    return {"id": row["id"], "square": row["id"] ** 2}


def test_rows_order_and_counts() -> None:
    dataset = ray.data.range(100, override_num_blocks=7).map(slow_first)
    source = from_ray(dataset.filter(lambda row: row["id"] >= 30))
    assert source.counts.sum() == 70
    assert source.counts.min() > 0
    tables = [source.read(block) for block in range(len(source.counts))]
    assert [len(table) for table in tables] == source.counts.tolist()
    rows = [row for table in tables for row in table.to_pylist()]
    assert rows == [{"id": number, "square": number**2} for number in range(30, 100)]

    @ray.remote
    def read_elsewhere(passed: object) -> list[int]:
        return [len(passed.read(block)) for block in range(len(passed.counts))]

    assert ray.get(read_elsewhere.remote(source)) == source.counts.tolist()


def test_fingerprint_follows_the_ends_of_all_blocks() -> None:
    def fingerprint(changed: int | None) -> str:
        rows = [{"x": np.full((2, 2), it + 100 * (it == changed)), "own": {it}} for it in range(12)]
        return from_ray(ray.data.from_items(rows, override_num_blocks=3)).fingerprint

    assert fingerprint(None) == fingerprint(None)
    ends = [0, 3, 4, 7, 8, 11]
    assert len({fingerprint(None), *map(fingerprint, ends)}) == 7


def tokenize(table: pa.Table) -> pa.Table:
    """The letters of each text."""
    letters = [list(text.encode()) for text in table["text"].to_pylist()]
    return pa.table({"input_ids": pa.array(letters, pa.list_(pa.int64()))})


def test_tokens_that_tasks_of_ray_made_are_packed_and_streamed() -> None:
    texts = [f"text {number}" for number in range(30)]
    dataset = ray.data.from_items([{"text": text} for text in texts], override_num_blocks=3)
    source = from_ray(dataset.map_batches(tokenize, batch_format="pyarrow"))
    packed = PackedBlocks(source, 16, how="best_fit")
    stream = make_source(rayzero.data.stream(packed), 2)
    seen = []
    for step in range(-(-int(packed.counts.sum()) // 2)):
        for sample in read_step(stream, 2 * step, 2, 1, 2):
            ids, begins = sample["input_ids"], np.flatnonzero(sample["position_ids"] == 0)
            documents = np.split(ids, begins[1:])
            seen += [bytes(it.astype(np.uint8)).decode() for it in documents if it.any()]
    assert set(seen) == set(texts)


def test_samples_through_faults(tmp_path: Path) -> None:
    source = from_ray(ray.data.range(47, override_num_blocks=7).map(slow_first))
    plain = [{"id": number, "square": number**2} for number in range(47)]
    check_through_faults(rayzero.data.stream(source, 2), plain, tmp_path, faults=25)


def test_lost_block_is_named() -> None:
    source = from_ray(ray.data.from_items([{"x": 1}, {"x": 2}], override_num_blocks=2))

    class Lost:
        pass

    def fail(*_: object, **__: object) -> None:
        raise ray.exceptions.ObjectLostError("ab" * 14, None, "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get", fail)
        with pytest.raises(DataError, match="Ray dataset, block 1 cannot be read"):
            source.read(1)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a ray\.data\.Dataset"):
        from_ray([1, 2])
    with pytest.raises(DataError, match="no rows"):
        from_ray(ray.data.range(5).filter(lambda row: False))
    with pytest.raises(DataError, match="the Ray dataset cannot be made: "):
        from_ray(ray.data.range(5).map(lambda row: {"x": 1 // 0}))

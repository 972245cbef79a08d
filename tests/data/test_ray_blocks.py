"""Ray datasets as blocks, against the datasets themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import rayzero.data
from rayzero.data import from_ray
from rayzero.engine.errors import ConfigError, DataError
from tests.engine.data.streams.exactness import check_through_faults

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


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

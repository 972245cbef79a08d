"""Parquet token shards: samples across row groups and shards, caching, errors."""

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayzero.engine.data.dataset import ParquetTokens
from rayzero.engine.errors import ConfigError, DataError


def write(path: Path, tokens: np.ndarray, row_group_size: int = 7) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"tokens": tokens}), path, row_group_size=row_group_size)


@pytest.fixture
def stream(tmp_path: Path) -> np.ndarray:
    """100 tokens in three shards with uneven row groups; the last shard is in a sub-folder."""
    tokens = np.random.default_rng(0).integers(0, 256, 100).astype(np.uint8)
    write(tmp_path / "data/0.parquet", tokens[:30])
    write(tmp_path / "data/1.parquet", tokens[30:33], row_group_size=2)
    write(tmp_path / "data/more/2.parquet", tokens[33:], row_group_size=50)
    return tokens


@pytest.mark.parametrize("context", [1, 3, 10, 33, 99])
def test_samples_are_the_stream(tmp_path: Path, stream: np.ndarray, context: int) -> None:
    data = ParquetTokens(tmp_path / "data", context)
    assert data.num_tokens == 100
    assert len(data) == 99 // context
    for i in range(len(data)):
        sample = data[i]
        assert sample.dtype == torch.int64
        assert sample.tolist() == stream[i * context : (i + 1) * context + 1].tolist()
    assert data[-1].tolist() == data[len(data) - 1].tolist()
    with pytest.raises(IndexError):
        data[len(data)]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.uint32, np.int64])
def test_integer_dtypes(tmp_path: Path, dtype: type) -> None:
    tokens = np.array([0, 1, 127, 5], dtype=dtype)
    write(tmp_path / "tokens.parquet", tokens)
    assert ParquetTokens(tmp_path / "tokens.parquet", 3)[0].tolist() == [0, 1, 127, 5]


def test_file_folder_and_glob(tmp_path: Path, stream: np.ndarray) -> None:
    assert ParquetTokens(str(tmp_path / "data/0.parquet"), 2).num_tokens == 30
    assert ParquetTokens(str(tmp_path / "data/*.parquet"), 2).num_tokens == 33
    assert ParquetTokens(str(tmp_path / "data/**/*.parquet"), 2).num_tokens == 100


def test_row_groups_are_read_lazily_and_cached(
    tmp_path: Path, stream: np.ndarray, monkeypatch
) -> None:
    opened = []
    real = pq.ParquetFile

    def open_and_count(*args, **kwargs):
        opened.append(args)
        return real(*args, **kwargs)

    data = ParquetTokens(tmp_path / "data", 3, cached_row_groups=1)
    monkeypatch.setattr(
        "rayzero.engine.data.streams.sources.formats.pq.ParquetFile", open_and_count
    )
    assert data.num_tokens == 100  # read from the footers
    assert opened == []
    data[0], data[1], data[0]
    assert len(opened) == 1
    data[20], data[0]
    assert len(opened) == 3


def test_concurrent_reads(tmp_path: Path, stream: np.ndarray) -> None:
    data = ParquetTokens(tmp_path / "data", 3, cached_row_groups=2)
    with ThreadPoolExecutor(8) as pool:
        samples = list(pool.map(data.__getitem__, list(range(len(data))) * 20))
    for i, sample in zip(list(range(len(data))) * 20, samples, strict=True):
        assert sample.tolist() == stream[i * 3 : i * 3 + 4].tolist()


def test_pickle(tmp_path: Path, stream: np.ndarray) -> None:
    data = ParquetTokens(tmp_path / "data", 9)
    copy = pickle.loads(pickle.dumps(data))
    assert len(copy) == len(data)
    assert copy[3].tolist() == data[3].tolist()
    pattern = ParquetTokens(str(tmp_path / "data/*.parquet"), 2)
    assert pickle.loads(pickle.dumps(pattern)).num_tokens == 33


def put_text(path: Path) -> None:
    path.write_text("not Parquet at all")


def table(**columns: list[Any]) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pa.table(columns), path)


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (lambda path: None, "no files at .*data"),
        (Path.mkdir, "no files at"),
        (put_text, "data is damaged"),
        (table(words=["a"]), "no columns \\['tokens'\\]"),
        (table(tokens=[0.5]), "of type double"),
        (table(tokens=[[1, 2], [3]]), "of type list"),
        (lambda path: write(path, np.arange(2, dtype=np.uint8)), "holds 2 tokens"),
        (lambda path: write(path, np.empty(0, dtype=np.uint8)), "has no rows"),
        (table(tokens=[1, None, 3]), "1 missing tokens"),
    ],
)
def test_invalid_data(tmp_path: Path, put: Callable[[Path], None], message: str) -> None:
    put(tmp_path / "data")
    with pytest.raises(DataError, match=message) as caught:
        ParquetTokens(tmp_path / "data", 2)[0]
    assert caught.value.allowed
    assert caught.value.fix


def test_invalid_arguments(tmp_path: Path, stream: np.ndarray) -> None:
    with pytest.raises(DataError, match="no files at"):
        ParquetTokens(str(tmp_path / "*.parquet"), 2)
    with pytest.raises(ConfigError, match=r"context of ParquetTokens\(\) is 0"):
        ParquetTokens(tmp_path / "data", 0)

"""Tables made of others, and their cache in a folder."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rayzero.data
from rayzero.engine.data.streams.mapping import TableFunction
from rayzero.engine.errors import ConfigError, DataError
from tests.engine.data.streams.memory import MemorySource, make_source, read_step

COUNTS = [5, 3, 8]


def tokenize(table: pa.Table) -> pa.Table:
    """The letters of each text."""
    texts = table["text"].to_pylist()
    return pa.table({"input_ids": pa.array([list(it.encode()) for it in texts])})


class Counted:
    """`tokenize`, with the number of its calls by the rows that it got."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()

    def __call__(self, table: pa.Table) -> pa.Table:
        self.calls[len(table)] += 1
        return tokenize(table)


def rows_of(source: Any) -> list[Any]:
    return [row for block in range(len(COUNTS)) for row in source.read(block).to_pylist()]


EXPECTED = [{"input_ids": list(f"memory-{row}".encode())} for row in range(sum(COUNTS))]


def test_blocks_are_made_once_and_read_from_the_cache(tmp_path: Path) -> None:
    first = Counted()
    memory = MemorySource(COUNTS)
    assert rows_of(rayzero.data.map_blocks(memory, first, tmp_path, "letters")) == EXPECTED
    assert first.calls == {5: 1, 3: 1, 8: 1}
    memory.reads.clear()
    later = Counted()
    assert rows_of(rayzero.data.map_blocks(memory, later, tmp_path, "letters")) == EXPECTED
    assert not later.calls
    assert not memory.reads
    for source, version in (
        (MemorySource(COUNTS), "other"),
        (MemorySource(COUNTS, "b"), "letters"),
    ):
        other = Counted()
        rows_of(rayzero.data.map_blocks(source, other, tmp_path, version))
        assert other.calls.total() == 3


@pytest.mark.parametrize("damage", [b"", b"x" * 10, None])
def test_a_damaged_file_is_made_again(
    tmp_path: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    rows_of(rayzero.data.map_blocks(MemorySource(COUNTS), tokenize, tmp_path, "letters"))
    (file,) = tmp_path.rglob("1.arrow")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if damage is None else damage)
    again = Counted()
    assert (
        rows_of(rayzero.data.map_blocks(MemorySource(COUNTS), again, tmp_path, "letters"))
        == EXPECTED
    )
    assert again.calls == {3: 1}
    assert "1.arrow is damaged" in caplog.text


def test_several_workers_write_one_block_at_once(tmp_path: Path) -> None:
    """Each makes it, because none is done when the others look; none reads half of a file."""
    together = threading.Barrier(4, timeout=60)

    def wait_and_tokenize(table: pa.Table) -> pa.Table:
        together.wait()
        return tokenize(table)

    workers = [
        rayzero.data.map_blocks(MemorySource(COUNTS), wait_and_tokenize, tmp_path, "letters")
        for _ in range(4)
    ]
    with ThreadPoolExecutor(4) as pool:
        tables = list(pool.map(lambda it: it.read(2), workers))
    assert all(table.to_pylist() == EXPECTED[8:] for table in tables)
    assert [it.name for it in tmp_path.rglob("*") if it.is_file()] == ["2.arrow"]


def test_made_blocks_are_packed_and_mixed(tmp_path: Path) -> None:
    """Lengths are read through the cache; a sequence has the letters of the texts."""
    calls = Counted()
    letters = rayzero.data.map_blocks(MemorySource(COUNTS), calls, tmp_path, "letters")
    packed = rayzero.data.PackedBlocks(letters, 20, how="concatenate")
    mixed = rayzero.data.mix({"packed": (packed, 0.5), "letters": (letters, 0.5)})
    source = make_source(mixed, 2)
    seen: Counter[bytes] = Counter()
    for step in range(2 * sum(COUNTS)):
        for sample in read_step(source, 2 * step, 2, 1, 2):
            seen[bytes(sample["input_ids"].astype("uint8"))] += 1
    assert calls.calls == {5: 1, 3: 1, 8: 1}
    assert all(seen[bytes(row["input_ids"])] for row in EXPECTED)
    joined = b"".join(bytes(row["input_ids"]) for row in EXPECTED[:5])
    assert seen[joined[:20]]


def bad_rows(table: pa.Table) -> pa.Table:
    return table.slice(1)


def no_table(table: pa.Table) -> Any:
    return table.to_pylist()


def failing(table: pa.Table) -> pa.Table:
    raise KeyError("content")


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (bad_rows, "made 2 rows of memory block 1"),
        (no_table, "made a list of memory block 1"),
        (failing, "failed on memory block 1: KeyError: 'content'"),
    ],
)
def test_what_a_function_does_wrong_is_named(function: TableFunction, match: str) -> None:
    with pytest.raises(DataError, match=match):
        rayzero.data.map_blocks(MemorySource(COUNTS), function).read(1)


def test_a_cache_needs_a_version_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no version"):
        rayzero.data.map_blocks(MemorySource(COUNTS), tokenize, tmp_path)
    (tmp_path / "file").write_text("")
    source = rayzero.data.map_blocks(MemorySource(COUNTS), tokenize, tmp_path / "file", "letters")
    with pytest.raises(DataError, match=r"cache of map_blocks\(\) cannot be used"):
        source.read(0)


def test_a_changed_function_is_another_source() -> None:
    names = {
        rayzero.data.map_blocks(MemorySource(COUNTS), it).fingerprint for it in (tokenize, bad_rows)
    }
    assert len(names) == 2

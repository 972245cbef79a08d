"""Reads return correct bytes, never damaged ones, and read no more than needed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.checkpoint.errors import CheckpointDamagedError
from rayzero.engine.checkpoint.format import BLOCK_BYTES
from rayzero.engine.checkpoint.manifest import make_manifest
from rayzero.engine.checkpoint.reader import CheckpointSource
from rayzero.engine.checkpoint.store_local import LocalReadStream
from rayzero.engine.checkpoint.writer import commit_checkpoint, write_rank_file
from rayzero.engine.errors import EngineError
from rayzero.engine.layout.state_index import BlockIndex, LogicalTensor, TensorRange
from tests.engine.checkpoint.saving import read_manifest, save

LONG = 5 * BLOCK_BYTES + 1234


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory):
    """A checkpoint of one rank with several blocks of data: (folder, data)."""
    folder = str(tmp_path_factory.mktemp("long") / "step-1")
    data = random.Random(0).randbytes(LONG)
    tensors = {"weights/w": LogicalTensor("U8", (LONG,))}
    index = BlockIndex(tensors, (TensorRange("weights/w", 0, LONG, 0),), LONG)
    file = write_rank_file(
        folder, 0, index, {"step": 1}, memoryview(data), generation=1, world_size=1
    )
    commit_checkpoint(folder, make_manifest("job", 1, 1, [file]))
    return folder, data


EDGES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, LONG - 1, LONG]
OFFSETS = st.one_of(st.sampled_from(EDGES), st.integers(0, LONG))
SPANS = st.tuples(OFFSETS, OFFSETS).map(sorted)


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Sizes of the reads of local files, in bytes."""
    counts: list[int] = []
    read = LocalReadStream.read

    def read_and_count(self, offset, parts):
        counts.append(read(self, offset, parts))
        return counts[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalReadStream, "read", read_and_count)
        yield counts


@given(st.lists(SPANS, max_size=8))
def test_read_any_spans_in_any_order(long_checkpoint, spans):
    folder, data = long_checkpoint
    source = CheckpointSource(folder)
    for start, stop in spans:
        into = bytearray(b"\xaa" * (stop - start))
        source.read(0, start, memoryview(into))
        assert into == data[start:stop]
    source.close()


@given(st.lists(st.integers(1, 2 * BLOCK_BYTES), max_size=8), st.integers(0, BLOCK_BYTES))
def test_consecutive_reads_read_each_block_once(long_checkpoint, sizes, offset):
    folder, data = long_checkpoint
    source = CheckpointSource(folder)
    start = offset
    with counted_reads() as counts:
        for size in sizes:
            stop = min(LONG, offset + size)
            into = bytearray(stop - offset)
            source.read(0, offset, memoryview(into))
            assert into == data[offset:stop]
            offset = stop
    first, end = start // BLOCK_BYTES, -(-offset // BLOCK_BYTES)
    nbytes = min(LONG, end * BLOCK_BYTES) - first * BLOCK_BYTES if offset > start else 0
    assert sum(counts) == nbytes
    source.close()


def test_read_beyond_the_data_is_an_error(long_checkpoint):
    source = CheckpointSource(long_checkpoint[0])
    for offset, length in ((LONG, 1), (LONG - 1, 2), (-1, 1), (0, LONG + 1)):
        with pytest.raises(EngineError, match="were requested"):
            source.read(0, offset, memoryview(bytearray(length)))


@pytest.mark.parametrize("number", range(6))
def test_damaged_blocks_are_never_returned(tmp_path, long_checkpoint, number):
    folder, data = long_checkpoint
    entry = read_manifest(folder).files[0]
    offset = entry.data_offset + min(number * BLOCK_BYTES + 77, LONG - 1)
    copy = tmp_path / "step-1"
    copy.mkdir()
    for name in (entry.name, "manifest.json"):
        raw = bytearray((tmp_path / folder / name).read_bytes())
        if name == entry.name:
            raw[offset] ^= 0x10
        (copy / name).write_bytes(raw)
    source = CheckpointSource(str(copy))
    with pytest.raises(CheckpointDamagedError, match=f"{entry.name} is damaged: block {number} "):
        source.read(0, 0, memoryview(bytearray(LONG)))
    into = bytearray(1)
    other = (number + 1) % 6
    source.read(0, other * BLOCK_BYTES, memoryview(into))  # other blocks can be read
    assert into[0] == data[other * BLOCK_BYTES]
    with pytest.raises(CheckpointDamagedError):  # nor from the cached block
        source.read(0, min(number * BLOCK_BYTES + 5, LONG - 1), memoryview(into))


def test_errors_name_truncated_and_missing_files(tmp_path):
    manifest = save(tmp_path, 5)
    source = CheckpointSource(str(tmp_path / "step-5"))
    first, second = (tmp_path / "step-5" / file.name for file in manifest.files)
    with first.open("r+b") as file:
        file.truncate(manifest.files[0].data_offset + BLOCK_BYTES)
    second.unlink()
    with pytest.raises(CheckpointDamagedError, match=f"{first.name} ends in block 1"):
        source.read(0, 0, memoryview(bytearray(manifest.files[0].block_index.nbytes)))
    with pytest.raises(CheckpointDamagedError, match=f"{second.name} is missing"):
        source.read(1, 0, memoryview(bytearray(1)))

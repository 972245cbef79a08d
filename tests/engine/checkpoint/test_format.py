"""Format of rank files, which the safetensors library reads, and of the manifest; reading them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from rayzero.engine.checkpoint.errors import CheckpointDamagedError, CheckpointVersionError
from rayzero.engine.checkpoint.format import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    file_header,
    is_checkpoint_file,
    new_file_name,
    parse_step,
    step_folder_name,
)
from rayzero.engine.checkpoint.manifest import Manifest, RankFile, make_manifest
from rayzero.engine.checkpoint.reader import CheckpointSource
from rayzero.engine.checkpoint.store_local import LocalReadStream
from rayzero.engine.checkpoint.writer import commit_checkpoint, write_rank_file
from rayzero.engine.errors import EngineError
from rayzero.engine.layout.reshard import MissingRangesError, plan_copies
from rayzero.engine.layout.state_index import DTYPE_BYTES, BlockIndex, LogicalTensor, TensorRange
from tests.engine.checkpoint.saving import blocks, read_manifest, save, with_changes, write_files

# Names that are difficult for JSON parsers.
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).map("weights/{}".format)


@st.composite
def indexes(draw: st.DrawFn) -> BlockIndex:
    """Ranges of any dtype, in any order, with any gaps; some are empty."""
    tensors, ranges, offset = {}, [], 0
    for name in draw(st.lists(NAMES, max_size=6, unique=True)):
        dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        tensor = tensors[name] = LogicalTensor(dtype, shape)
        cuts = sorted(draw(st.lists(st.integers(0, tensor.numel), min_size=2, max_size=5)))
        for start, stop in pairwise(cuts):
            offset += draw(st.integers(0, 9))
            ranges.append(TensorRange(name, start, stop, offset))
            offset += (stop - start) * tensor.item_bytes
    order = draw(st.permutations(ranges))
    nbytes = offset + draw(st.integers(0, 9))
    return BlockIndex(tensors, tuple(order), nbytes, draw(st.integers(0, offset)))


def read_with_safetensors(path: str) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@given(index=indexes(), seed=st.integers(0, 255))
def test_safetensors_reads_every_range(tmp_path_factory, index, seed):
    data = bytes((seed + 7 * i) % 256 for i in range(index.nbytes))
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(file_header(index, {"step": 3}) + data)
    tensors = read_with_safetensors(str(path))
    covered = 0
    for part in index.ranges:
        size = index.tensors[part.name].item_bytes
        if part.start < part.stop:
            tensor = tensors.pop(f"{part.name}[{part.start}:{part.stop}]")
            assert tensor.shape == (part.stop - part.start,)
            raw = data[part.offset : part.offset + tensor.nbytes]
            assert bytes(tensor.view(torch.uint8).numpy()) == raw
            assert tensor.element_size() == size
            covered += len(raw)
    assert all(name.startswith("padding[") for name in tensors)
    assert covered + sum(padding.nbytes for padding in tensors.values()) == index.nbytes


def test_rank_file_has_metadata(tmp_path):
    (first, _) = write_files(str(tmp_path), step=7)
    path = tmp_path / first.name
    with safe_open(str(path), framework="pt") as file:
        assert file.metadata() == {
            "format": "rayzero",
            "format_version": "1",
            "step": "7",
            "rank": "0",
            "world_size": "2",
            "generation": "1",
        }
    assert path.stat().st_size == first.nbytes
    assert (first.nbytes - first.block_index.nbytes) % 4096 == 0
    assert path.read_bytes()[-first.block_index.nbytes :] == blocks(7)[0].data


def test_data_length_is_checked_before_writing(tmp_path):
    with pytest.raises(EngineError, match="an index of 10 bytes was given for 3"):
        write_rank_file(
            str(tmp_path / "new"),
            0,
            BlockIndex(nbytes=10),
            {},
            memoryview(b"abc"),
            generation=1,
            world_size=1,
        )
    assert not (tmp_path / "new").exists()


def test_step_folder_and_file_names():
    assert parse_step(step_folder_name(0)) == 0
    assert parse_step("step-120") == 120
    assert [parse_step(name) for name in ("step-", "step-01", "step--1", "step-1x", "x")] == [
        None
    ] * 5
    name = new_file_name(3)
    names = [name, f".{name}.partial", "manifest.json", "notes.txt", "model.safetensors"]
    assert [is_checkpoint_file(name) for name in names] == [True, True, True, False, False]


KEYS = st.text(max_size=5).map("script {}".format)  # others have a type
VALUES = st.none() | st.floats(allow_nan=False) | st.text(max_size=5)


@given(
    indexes(),
    st.dictionaries(KEYS, VALUES, max_size=3),
    st.integers(0, 10**9),
    st.sampled_from([None, 0, 3]),
)
def test_manifest_round_trip(index, metadata, step, stage):
    ranges, nbytes = [], 0
    for name, tensor in index.tensors.items():  # alone a complete checkpoint
        ranges.append(TensorRange(name, 0, tensor.numel, nbytes))
        nbytes += tensor.numel * tensor.item_bytes
    index = BlockIndex(index.tensors, tuple(ranges), nbytes, min(nbytes, index.constant_bytes))
    checksum = "0123456789abcdef"
    checksums = checksum * -(-nbytes // (256 * 1024))
    name = new_file_name(0)
    file = RankFile(name, nbytes + 4096, checksum, checksums, nbytes, 0, index, metadata)
    manifest = make_manifest("gpt", step, 4, [file], stage=stage)
    assert Manifest.from_bytes(manifest.to_bytes(), "m") == manifest
    assert json.loads(manifest.to_bytes())["checkpoint"]["step"] == step


def test_any_changed_byte_of_the_manifest_is_detected(tmp_path):
    raw = save(tmp_path, 3).to_bytes()
    for offset in range(len(raw)):
        changed = bytearray(raw)
        changed[offset] ^= 1
        with pytest.raises(CheckpointDamagedError, match="damaged"):
            Manifest.from_bytes(bytes(changed), "m")
    for length in (0, 1, 40, len(raw) // 2, len(raw) - 1):
        with pytest.raises(CheckpointDamagedError):
            Manifest.from_bytes(raw[:length], "m")


def test_newer_version_error_names_both_versions(tmp_path):
    raw = with_changes(save(tmp_path, 3).to_bytes(), format_version=FORMAT_VERSION + 6, new="thing")
    with pytest.raises(CheckpointVersionError) as caught:
        Manifest.from_bytes(raw, "x/manifest.json")
    assert "x/manifest.json has format version 8" in str(caught.value)
    assert f"versions up to {FORMAT_VERSION}" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../../etc/passwd"},
        {"name": "rank-00000-0123abcd.safetensors/x"},
        {"blocks": ""},
        {"blocks": "zz"},
        {"nbytes": 10},
        {"ranges": [[0, 0, 10**9, 0]]},
        {"ranges": [[0, 0, 10, -4]]},
        {"ranges": [[0, 5, 2, 0]]},
        {"ranges": [[99, 0, 1, 0]]},
        {"ranges": 3},
        {"small": []},
    ],
)
def test_manifest_with_invalid_references_is_rejected(tmp_path, change):
    """The checksum is valid: the manifest is forged, not damaged."""
    raw = save(tmp_path, 3).to_bytes()
    assert Manifest.from_bytes(with_changes(raw), "m")
    files = json.loads(raw)["checkpoint"]["files"]
    with pytest.raises(CheckpointDamagedError, match="not a manifest that rayzero wrote"):
        Manifest.from_bytes(with_changes(raw, files=[files[0] | change, files[1]]), "m")


@pytest.mark.parametrize(("missing", "more"), [(5, ""), (7, " and 2 more")])
def test_five_missing_ranges_are_listed(missing: int, more: str):
    wanted = [TensorRange(f"w{number}", 0, 2, 0) for number in range(missing)]
    with pytest.raises(MissingRangesError, match=rf", w4\[0:2\]{more}$"):
        plan_copies(wanted, [])


def test_manifest_requires_all_ranks_and_elements(tmp_path):
    first, second = write_files(str(tmp_path), step=1)
    with pytest.raises(EngineError, match=r"these are of ranks \[1\]"):
        make_manifest("job", 1, 1, [second])
    with pytest.raises(EngineError, match=r"ranks \[0, 0\]"):
        make_manifest("job", 1, 1, [first, first])
    with pytest.raises(MissingRangesError, match="weights/a"):
        make_manifest("job", 1, 1, [first])
    assert make_manifest("job", 1, 1, [second, first]).world_size == 2


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

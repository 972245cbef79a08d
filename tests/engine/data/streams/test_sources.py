"""Each format against a plain reader; blocks; files that change, vanish or are damaged."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayzero.data import blocks
from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.store_local import LocalReadStream, LocalStore
from rayzero.engine.data.streams.block import BlockSource
from rayzero.engine.data.streams.sources import files as source_files
from rayzero.engine.data.streams.sources import json_lines as json_format
from rayzero.engine.errors import ConfigError, DataError

TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)
ROWS = st.lists(
    st.fixed_dictionaries(
        {"id": st.integers(-(2**63), 2**63 - 1)},
        optional={
            "text": TEXTS,
            "part": st.fixed_dictionaries({}, optional={"x": st.floats(allow_nan=False, width=32)}),
            "tags": st.lists(TEXTS, max_size=3),
            "flag": st.booleans(),
        },
    ),
    min_size=1,
    max_size=30,
)


def read_rows(source: BlockSource) -> list[dict]:
    tables = [source.read(block) for block in range(len(source.counts))]
    assert [len(table) for table in tables] == source.counts.tolist()
    assert all(table.schema == tables[0].schema for table in tables)
    return [row for table in tables for row in table.to_pylist()]


def json_lines(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def write_tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> None:
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("property")


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, block_bytes=st.integers(1, 400), frames=st.integers(1, 4))
def test_json_lines_are_those_of_json(folder, rows, block_bytes, frames) -> None:
    lines = json_lines(rows).splitlines(keepends=True)
    step = -(-len(lines) // frames)
    parts = [b"".join(lines[at : at + step]) for at in range(0, len(lines), step)]
    for name, compress in {
        "x.jsonl": lambda it: it,
        "x.jsonl.gz": gzip.compress,
        "x.jsonl.zst": lambda it: pa.Codec("zstd").compress(it, asbytes=True),
    }.items():
        path = folder / name
        path.write_bytes(b"".join(map(compress, parts)))
        source = blocks(path, block_bytes=block_bytes)
        with patch.object(json_format, "_PARSED_BYTES", 3 * block_bytes):
            found = read_rows(source)
        assert list(map(without_nulls, found)) == list(map(without_nulls, rows)), name
        assert name == "x.jsonl" or source.counts.tolist() == [len(rows)]
    plain = blocks(folder / "x.jsonl", block_bytes=1)
    assert plain.counts.tolist() == [1] * len(rows)


def without_nulls(value: object) -> object:
    """JSON has no columns: what is missing and what is null or empty are alike."""
    if not isinstance(value, dict):
        return value
    inner = {key: without_nulls(it) for key, it in value.items()}
    return {key: it for key, it in inner.items() if it not in (None, {})}


@pytest.mark.parametrize("parsed_bytes", [1, 1 << 20])
def test_json_types_are_of_all_lines_together(
    parsed_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_format, "_PARSED_BYTES", parsed_bytes)
    (tmp_path / "a.jsonl").write_bytes(b'{"x": 1, "t": "2020-01-01"}\n\n  \n{"x": null}\n')
    (tmp_path / "b.jsonl").write_bytes(b'{"x": 2.5, "t": "soon"}\n{"y": [{"z": 1}]}')
    source = blocks(tmp_path, block_bytes=1)
    assert read_rows(source) == [
        {"x": 1.0, "t": "2020-01-01", "y": None},
        {"x": None, "t": None, "y": None},
        {"x": 2.5, "t": "soon", "y": None},
        {"x": None, "t": None, "y": [{"z": 1}]},
    ]
    assert source.counts.sum() == 4
    chosen = blocks(tmp_path, columns=["t"], schema=pa.schema([("t", pa.string())]))
    assert [row["t"] for row in read_rows(chosen)] == ["2020-01-01", None, "soon", None]
    (tmp_path / "c.jsonl").write_bytes(b'{"x": "text"}\n')
    with pytest.raises(DataError, match=r"c\.jsonl does not fit.*\n.*\n.*schema="):
        blocks(tmp_path)


def test_zstd_of_the_command_line(tmp_path: Path) -> None:
    """Its frames have a checksum, and sizes of several bytes."""
    rows = [{"id": number, "text": f"{number}" * 50} for number in range(20000)]
    paths = []
    for name, options in {"a": ["-19"], "b": ["--no-check", "-1"], "c": ["--long=24"]}.items():
        raw = tmp_path / f"{name}.raw"
        raw.write_bytes(json_lines(rows))
        subprocess.run(["zstd", "-q", *options, raw, "-o", tmp_path / name], check=True)
        paths.append((tmp_path / name).read_bytes())
        raw.unlink()
        (tmp_path / name).unlink()
    skipped = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    (tmp_path / "x.jsonl.zst").write_bytes(skipped + skipped.join(paths))
    source = blocks(tmp_path, block_bytes=1)
    assert source.counts.tolist() == [60000]
    assert read_rows(source) == rows * 3


@settings(max_examples=30, deadline=None)
@given(
    samples=st.lists(
        st.dictionaries(st.sampled_from(["jpg", "cls", "meta.json"]), st.binary(max_size=1500)),
        min_size=1,
        max_size=12,
    ),
    block_bytes=st.integers(1, 6000),
    long_names=st.booleans(),
)
def test_tars_are_those_of_tarfile(folder, samples, block_bytes, long_names) -> None:
    prefix = "é" * 120 if long_names else "s"
    members = [
        (f"d/{prefix}{number:03d}.{suffix}", content)
        for number, sample in enumerate(samples)
        for suffix, content in sample.items()
    ]
    for name, mode in {"x.tar": "w", "x.tar.gz": "w:gz"}.items():
        write_tar(folder / name, [*members, ("d/README", b"left out")], mode)
        expected: dict[str, dict[str, bytes]] = {}
        with tarfile.open(folder / name) as tar:
            for member in tar:
                key, _, suffix = member.name.partition(".")
                if suffix:
                    expected.setdefault(key, {})[suffix] = tar.extractfile(member).read()
        if not expected:
            with pytest.raises(DataError, match="no rows"):
                blocks(folder / name)
            continue
        source = blocks(folder / name, block_bytes=block_bytes)
        rows = {row.pop("__key__"): row for row in read_rows(source)}
        found = {
            key: {suffix: it for suffix, it in row.items() if it is not None}
            for key, row in rows.items()
        }
        assert found == expected
        assert name == "x.tar" or len(source.counts) == 1


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 99), TEXTS), min_size=1), size=st.integers(1, 9))
def test_parquet_is_that_of_pyarrow(folder, rows, size) -> None:
    numbers, texts = zip(*rows, strict=True)
    table = pa.table({"n": pa.array(numbers), "t": pa.array(texts)})
    for name in ("a", "b"):
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=size)
    source = blocks(folder / "*.parquet")
    assert source.counts[: len(source.counts) // 2].tolist() == [
        min(size, len(rows) - at) for at in range(0, len(rows), size)
    ]
    assert read_rows(source) == pq.read_table(folder / "a.parquet").to_pylist() * 2
    chosen = blocks(folder, columns=["t"], format="parquet")
    assert read_rows(chosen) == [{"t": text} for text in texts] * 2


def test_images_by_folder(tmp_path: Path) -> None:
    content = {f"{label}/in/{n}.png": os.urandom(50) for label in ("cat", "ant") for n in range(20)}
    for name, image in content.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(image)
    source = blocks(tmp_path, block_bytes=200)
    rows = read_rows(source)
    assert {row["path"]: row["image"] for row in rows} == content
    assert source.classes == ["ant", "cat"]
    assert all(row["label"] == (row["path"].startswith("cat")) for row in rows)
    assert source.counts.tolist() == [4] * 10
    assert len({row["label"] for row in source.read(0).to_pylist()}) == 2
    os.truncate(tmp_path / rows[0]["path"], 3)
    with pytest.raises(DataError, match=f"{rows[0]['path']}, in block 0 has changed"):
        source.read(0)
    assert blocks(tmp_path, ["label"], block_bytes=200).read(0).column_names == ["label"]


def write_parquet(path: Path) -> Path:
    table = pa.table({"x": pa.array(range(100), pa.int64())})
    options = {"compression": "none", "write_page_checksum": True, "use_dictionary": False}
    pq.write_table(table, path / "a.parquet", row_group_size=25, **options)
    return path / "a.parquet"


def write_json(path: Path) -> Path:
    (path / "a.jsonl").write_bytes(json_lines([{"x": "abcdefgh" * 8}] * 100))
    return path / "a.jsonl"


def write_gzip(path: Path) -> Path:
    part = gzip.compress(json_lines([{"x": number} for number in range(25)]))
    (path / "a.jsonl.gz").write_bytes(part * 4)
    return path / "a.jsonl.gz"


def write_samples(path: Path) -> Path:
    write_tar(path / "a.tar", [(f"{number:03d}.txt", b"x" * 700) for number in range(100)])
    return path / "a.tar"


WRITERS = [write_parquet, write_json, write_gzip, write_samples]
Writer = Callable[[Path], Path]


def open_written(write: Writer, path: Path, **options: object) -> BlockSource:
    return blocks(write(path), block_bytes=300, **options)


@pytest.mark.parametrize("write", WRITERS)
def test_changed_and_vanished_files_are_named(write: Writer, tmp_path: Path) -> None:
    source = open_written(write, tmp_path)
    last = len(source.counts) - 1
    (path,) = tmp_path.iterdir()
    status = path.stat()
    os.utime(path, ns=(0, status.st_mtime_ns + 1_000_000))
    with pytest.raises(DataError, match="has changed since it was listed") as caught:
        source.read(last)
    assert source.describe(last) in str(caught.value)
    os.utime(path, ns=(0, status.st_mtime_ns))
    assert len(source.read(last)) == source.counts[last]
    os.truncate(path, status.st_size // 2)
    with pytest.raises(DataError, match="has changed since it was listed"):
        source.read(last)
    path.unlink()
    with pytest.raises(DataError, match="has vanished"):
        source.read(last)


@pytest.mark.parametrize("write", WRITERS)
def test_damage_that_keeps_size_and_time_is_found(write: Writer, tmp_path: Path) -> None:
    source = open_written(write, tmp_path, index_dir=tmp_path / "index")
    last = len(source.counts) - 1
    path = next(path for path in tmp_path.iterdir() if path.is_file())
    status = path.stat()
    raw = bytearray(path.read_bytes())
    if write is write_parquet:
        at = raw.find(b"".join(number.to_bytes(8, "little") for number in (98, 99)))
    else:  # a name in the header of a tar, a value in the others
        at = source._index["start"][last].as_py() + (20 if write is write_samples else 30)
    raw[at] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(0, status.st_mtime_ns))
    with pytest.raises(DataError, match="is damaged") as caught:
        source.read(last)
    assert source.describe(last) in str(caught.value)
    assert not last or len(source.read(0)) == source.counts[0]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "jsonl.gz", "jsonl.zst", "tar", "tgz"])
@pytest.mark.parametrize("content", [b"", b"{not this format", b"PAR1" * 9])
def test_files_of_another_content_are_named(suffix: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / f"a.{suffix}").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.{suffix} (is damaged|has no rows)"):
        blocks(tmp_path / f"a.{suffix}")


def test_tar_with_a_damaged_header_does_not_end_there(tmp_path: Path) -> None:
    path = write_samples(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[50 * 1536 + 5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match=f"no header of a file at byte {50 * 1536}"):
        blocks(path)


@pytest.mark.parametrize("write", WRITERS)
def test_index_is_found_again_and_follows_the_files(
    write: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_dir = tmp_path / "index"
    data = tmp_path / "data"
    data.mkdir()
    first = open_written(write, data, index_dir=index_dir)
    expected = read_rows(first)
    (saved,) = index_dir.iterdir()
    (path,) = data.iterdir()
    scans: list[str] = []
    real = type(first._form).scan

    def scan(self, reader):
        scans.append(reader.file.name)
        return real(self, reader)

    monkeypatch.setattr(type(first._form), "scan", scan)
    again = blocks(path, block_bytes=300, index_dir=index_dir)
    assert not scans
    assert read_rows(again) == expected
    assert again.fingerprint == first.fingerprint
    saved.write_bytes(saved.read_bytes()[:-1])
    assert read_rows(blocks(path, block_bytes=300, index_dir=index_dir)) == expected
    assert len(scans) == 1
    os.utime(path, ns=(0, 10**18))
    changed = blocks(path, block_bytes=300, index_dir=index_dir)
    assert len(scans) == 2
    assert changed.fingerprint != first.fingerprint
    copy = pickle.loads(pickle.dumps(changed))
    assert read_rows(copy) == expected
    assert copy.fingerprint == changed.fingerprint


def test_reads_are_repeated_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_written(write_parquet, tmp_path, retry_s=5.0)
    pauses: list[float] = []
    now = [0.0]
    failures = [3]

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        now[0] += pause_s

    real = LocalReadStream.read

    def read(self, offset, parts):
        if failures[0]:
            failures[0] -= 1
            raise StoreError("slow", self.url, "SLOW_DOWN")
        return real(self, offset, parts)

    monkeypatch.setattr(LocalReadStream, "read", read)
    monkeypatch.setattr(source_files.time, "sleep", sleep)
    monkeypatch.setattr(source_files.time, "monotonic", lambda: now[0] + 1)
    assert source.read(1)["x"].to_pylist() == list(range(25, 50))
    assert pauses == [0.1, 0.2, 0.4]
    failures[0] = 10**9
    begin = now[0]
    with pytest.raises(DataError, match=r"row group 2 cannot be read.*SLOW_DOWN"):
        source.read(2)
    assert now[0] - begin <= 5.0
    failures[0] = 0
    monkeypatch.setattr(
        LocalStore, "open", lambda *_: (_ for _ in ()).throw(StoreError("forbidden", "u", "no"))
    )
    pauses.clear()
    with pytest.raises(DataError, match="cannot be read"):
        source.read(2)
    assert not pauses


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", "a.jsonl b.jsonl"),
        ("**/*.jsonl", "a.jsonl b.jsonl d/c.jsonl d/e/f.jsonl"),
        ("d/**", "d/c.jsonl d/e/f.jsonl"),
        ("?.jsonl", "a.jsonl b.jsonl"),
        ("d/*/[f]*", "d/e/f.jsonl"),
        ("", "a.jsonl b.jsonl d/c.jsonl d/e/f.jsonl"),
        ("d/c.jsonl", "d/c.jsonl"),
    ],
)
def test_patterns(tmp_path: Path, pattern: str, expected: str) -> None:
    for name in "a.jsonl b.jsonl d/c.jsonl d/e/f.jsonl .x/a.jsonl _b.jsonl d/_SUCCESS".split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    for top in (str(tmp_path), f"file://{tmp_path}")[: 1 if "?" in pattern else 2]:
        found = source_files.list_files(f"{top}/{pattern}".rstrip("/"))
        assert [file.url.removeprefix(f"{tmp_path}/") for file in found] == expected.split()


def test_mistakes(tmp_path: Path) -> None:
    write_json(tmp_path)
    write_parquet(tmp_path)
    with pytest.raises(ConfigError, match="of several formats: parquet, json"):
        blocks(tmp_path)
    for nothing in ([], None, "", [""], 0):
        with pytest.raises(ConfigError, match=r"blocks\(\) got"):
            blocks(nothing)
    for columns in ([], ["x", "x"], "x"):
        with pytest.raises(ConfigError, match="columns is"):
            blocks(tmp_path / "a.jsonl", columns=columns)
    with pytest.raises(ConfigError, match=r"block_bytes of blocks\(\) is '8MB'"):
        blocks(tmp_path / "a.jsonl", block_bytes="8MB")
    with pytest.raises(ConfigError, match="given twice"):
        blocks([tmp_path / "a.jsonl", tmp_path / "*.jsonl"])
    with pytest.raises(DataError, match=r"no files at .*/none"):
        blocks(tmp_path / "none")
    with pytest.raises(DataError, match=r"no columns \['y'\]"):
        blocks(tmp_path / "a.jsonl", columns=["y"])
    with pytest.raises(DataError, match=r"a\.parquet has no columns \['y'\]"):
        blocks(tmp_path / "a.parquet", columns=["y"])
    with pytest.raises(ConfigError, match="did you mean 'parquet'"):
        blocks(tmp_path, format="parqet")
    with pytest.raises(ConfigError, match=r"a pyarrow\.Schema, for json only"):
        blocks(tmp_path / "a.jsonl", schema={"x": "string"})
    (tmp_path / "c.json").write_text(json.dumps([{"x": 1}], indent=1))
    with pytest.raises(DataError, match=r"c\.json is damaged: .*\n.*\n  fix: correct the file"):
        blocks(tmp_path / "c.json")
    pq.write_table(pa.table([[1], [2]], ["x", "x"]), tmp_path / "two.parquet")
    with pytest.raises(DataError, match=r"several columns \['x'\]"):
        blocks(tmp_path / "two.parquet")
    with pytest.raises(ConfigError, match="the URL s4://b cannot be used"):
        blocks("s4://b/c")
    pq.write_table(pa.table({"x": ["text"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet does not fit.*x: string.*x: int64"):
        blocks(tmp_path, format="parquet")

"""Every source through random faults and resizes: the samples of a plain reader, in one order."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import rayzero.data
from tests.engine.data.streams.exactness import check_through_faults
from tests.engine.data.streams.memory import MemorySource

ROWS = [{"id": number, "text": "é" * (number % 5)} for number in range(47)]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
Opened = tuple[Any, list[Any]]
"""A stream, and its samples by a plain reader."""


def open_parquet(folder: Path) -> Opened:
    for name, rows in (("a", ROWS[:20]), ("b", ROWS[20:])):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet", row_group_size=6)
    plain = [row for name in "ab" for row in pq.read_table(folder / f"{name}.parquet").to_pylist()]
    return rayzero.data.stream(rayzero.data.blocks(folder), 2), plain


def open_json(folder: Path, suffix: str, compress: Callable[[bytes], bytes]) -> Opened:
    parts = LINES.splitlines(keepends=True)
    for number in range(5):
        content = compress(b"".join(parts[number * 10 : number * 10 + 10]))
        (folder / f"{number}.jsonl{suffix}").write_bytes(content)
    source = rayzero.data.blocks(folder, block_bytes=100)
    return rayzero.data.stream(source, 2), [json.loads(line) for line in parts]


def open_plain_json(folder: Path) -> Opened:
    return open_json(folder, "", bytes)


def open_gzip(folder: Path) -> Opened:
    return open_json(folder, ".gz", gzip.compress)


def open_zstd(folder: Path) -> Opened:
    return open_json(folder, ".zst", lambda it: pa.Codec("zstd").compress(it, asbytes=True))


def open_tar(folder: Path) -> Opened:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for row in ROWS:
            member = tarfile.TarInfo(f"{row['id']:03d}.txt")
            member.size = len(row["text"].encode())
            tar.addfile(member, io.BytesIO(row["text"].encode()))
    with tarfile.open(folder / "a.tar") as tar:
        plain = [{"__key__": it.name[:3], "txt": tar.extractfile(it).read()} for it in tar]
    return rayzero.data.stream(rayzero.data.blocks(folder, block_bytes=4000), 2), plain


def open_images(folder: Path) -> Opened:
    for row in ROWS:
        Image.new("RGB", (2, 2), (row["id"], 0, 0)).save(folder / f"{row['id']}.png")

    def decode(row: dict[str, Any]) -> dict[str, Any]:
        pixel = Image.open(io.BytesIO(row["image"])).getpixel((0, 0))
        return {"pixel": pixel, "path": row["path"]}

    source = rayzero.data.blocks(folder, block_bytes=400)
    paths = [
        name for it in range(len(source.counts)) for name in source.read(it)["path"].to_pylist()
    ]
    plain = [{"pixel": Image.open(folder / it).getpixel((0, 0)), "path": it} for it in paths]
    return rayzero.data.stream(source, 2, transform=decode), plain


def open_hf_rows(folder: Path) -> Opened:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(ROWS).shuffle(seed=1)
    return rayzero.data.stream(rayzero.data.from_hf(dataset, 6), 2), list(dataset)


def open_hf_shards(folder: Path) -> Opened:
    datasets = pytest.importorskip("datasets")
    open_gzip(folder)
    files = sorted(map(str, folder.iterdir()))
    dataset = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    return rayzero.data.stream(rayzero.data.from_hf(dataset), 2), list(dataset)


def open_mixture(folder: Path) -> Opened:
    web, plain = open_parquet(folder)
    code = MemorySource([4] * 5, "code")
    rows = [{"row": number, "text": f"code-{number}"} for number in range(20)]
    mixture = {"web": (web, 3.0), "code": (rayzero.data.stream(code, 2), 1.0)}
    return rayzero.data.mix(mixture, changes={9: {"code": 2.0}}), plain + rows


def open_packed(folder: Path) -> Opened:
    """Documents of 1 to 5 numbers, which no two share; each block is cut into sequences of 4."""
    tokens = iter(range(1, 1000))
    documents = [[next(tokens) for _ in range(1 + number % 5)] for number in range(47)]
    table = pa.table({"input_ids": documents})
    pq.write_table(table, folder / "a.parquet", row_group_size=6)
    plain = []
    for begin in range(0, len(documents), 6):
        joined = [token for document in documents[begin : begin + 6] for token in document]
        joined += [0] * (-len(joined) % 4)
        plain += [{"ids": joined[at : at + 4]} for at in range(0, len(joined), 4)]
    packed = rayzero.data.PackedBlocks(rayzero.data.blocks(folder), 4, how="concatenate")
    to_lists = lambda row: {"ids": row["input_ids"].tolist()}  # noqa: E731
    return rayzero.data.stream(packed, 2, transform=to_lists), plain


def open_mapped(folder: Path) -> Opened:
    web, plain = open_parquet(folder)

    def double(table: pa.Table) -> pa.Table:
        return table.set_column(0, "id", pa.array([2 * it for it in table["id"].to_pylist()]))

    made = rayzero.data.map_blocks(web.parts[0].source, double, folder / "_made", "doubled")
    return rayzero.data.stream(made, 2), [row | {"id": 2 * row["id"]} for row in plain]


@pytest.mark.parametrize(
    "open_stream",
    [
        *(open_parquet, open_plain_json, open_gzip, open_zstd, open_tar, open_images),
        *(open_hf_rows, open_hf_shards, open_mixture, open_packed, open_mapped),
    ],
)
def test_samples_are_those_of_a_plain_reader(
    open_stream: Callable[[Path], Opened], tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    stream, plain = open_stream(folder)
    check_through_faults(stream, plain, tmp_path / "ledger", faults=25)

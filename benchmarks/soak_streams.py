"""The soak test's jobs on a stream: their files, and what a plain reader finds in these."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

import rayzero.data
from rayzero.engine.data.streams.block import BlockSource
from rayzero.engine.data.streams.readers import IterableStream
from rayzero.engine.data.streams.source import BlockStream

KINDS = ("parquet", "json_gz", "tar", "mixture", "iterable")
BLOCK_ROWS, BLOCK_BYTES, TAR_BLOCK_BYTES, WINDOW = 4, 500, 3000, 3
"""Blocks of a few rows, windows of 3 blocks."""
FILES = 5
SHARES = {"parquet": (24, 3.0), "json_gz": (16, 2.0), "tar": (10, 1.0)}
"""Rows and weight of each source of the mixture."""
CHANGES = {20: {"tar": 4.0}, 45: {"parquet": 0.0}, 70: {"parquet": 7.0, "tar": 0.5}}
READER_ROWS, SNAPSHOT_ROWS = (20, 17, 13), 6
"""Of the iterable's readers."""
BAD_PERIOD, BAD_NUMBER = 17, 5
"""In jobs with bad samples, one row of so many is bad."""

Sample = tuple[Tensor, Tensor]


def write(kind: str, folder: Path, samples: Sequence[Sample]) -> None:
    """Writes the samples as files, row after row."""
    rows = [
        {"number": number, "x": x.tolist(), "y": y.tolist()}
        for number, (x, y) in enumerate(samples)
    ]
    if kind == "mixture":
        for name, (count, _) in SHARES.items():
            _write_files(name, folder / name, rows[:count])
            rows = rows[count:]
    elif kind == "iterable":
        for reader, count in enumerate(READER_ROWS):
            _write_files("json_gz", folder / str(reader), rows[:count], files=1)
            rows = rows[count:]
    else:
        _write_files(kind, folder, rows)


def _write_files(kind: str, folder: Path, rows: list[dict[str, Any]], files: int = FILES) -> None:
    folder.mkdir(parents=True)
    size = -(-len(rows) // files)
    for number in range(files):
        own = rows[number * size : (number + 1) * size]
        if kind == "parquet":
            table = pa.Table.from_pylist(own)
            pq.write_table(table, folder / f"{number}.parquet", row_group_size=BLOCK_ROWS)
        elif kind == "json_gz":
            lines = "".join(json.dumps(row) + "\n" for row in own)
            (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        else:
            with tarfile.open(folder / f"{number}.tar", "w") as tar:
                for row in own:
                    content = json.dumps(row).encode()
                    member = tarfile.TarInfo(f"{row['number']:03d}.json")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def read_plainly(kind: str, folder: Path) -> dict[int, Sample]:
    """The samples by their numbers in the ledger, read by pyarrow, gzip and tarfile."""
    if kind == "iterable":
        return {
            row * len(READER_ROWS) + reader: sample
            for reader in range(len(READER_ROWS))
            for row, sample in enumerate(_read_files("json_gz", folder / str(reader)))
        }
    parts = [(name, folder / name) for name in SHARES] if kind == "mixture" else [(kind, folder)]
    return dict(enumerate(it for name, place in parts for it in _read_files(name, place)))


def _read_files(kind: str, folder: Path) -> Iterator[Sample]:
    for path in sorted(folder.iterdir()):
        if kind == "parquet":
            rows = pq.read_table(path).to_pylist()
        elif kind == "json_gz":
            rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        else:
            with tarfile.open(path) as tar:
                rows = [json.loads(tar.extractfile(it).read()) for it in tar]
        for row in rows:
            yield _to_sample(row)


def _to_sample(row: dict[str, Any]) -> Sample:
    return torch.tensor(row["x"], dtype=torch.float64), torch.tensor(row["y"], dtype=torch.float64)


def is_bad(number: int) -> bool:
    return number % BAD_PERIOD == BAD_NUMBER


class FileRows:
    """The rows of one reader of the iterable, with a state."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with gzip.open(self._path) as file:
            for number, line in enumerate(file):
                if number == self._next:
                    self._next += 1
                    yield json.loads(line)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


def open_stream(kind: str, folder: Path, *, has_bad: bool) -> BlockStream | IterableStream:
    """The training data of a job, whose samples have the numbers of `read_plainly`."""

    def transform(row: dict[str, Any]) -> Sample:
        row = json.loads(row["json"]) if "json" in row else row
        if has_bad and is_bad(row["number"]):
            raise ValueError(f"row {row['number']} is bad")
        return _to_sample(row)

    def of_files(kind: str, folder: Path) -> BlockStream:
        block_bytes = TAR_BLOCK_BYTES if kind == "tar" else BLOCK_BYTES
        source: BlockSource = rayzero.data.blocks(folder, block_bytes=block_bytes)
        return rayzero.data.stream(source, WINDOW, transform=transform)

    if kind == "mixture":
        parts = {name: (of_files(name, folder / name), SHARES[name][1]) for name in SHARES}
        return rayzero.data.mix(parts, changes=CHANGES)
    if kind == "iterable":
        return rayzero.data.iterable(
            lambda reader, readers: FileRows(folder / str(reader) / "0.jsonl.gz"),
            len(READER_ROWS),
            READER_ROWS,
            SNAPSHOT_ROWS,
            _to_sample,
        )
    return of_files(kind, folder)


def check_order(kind: str, plain: Mapping[int, Sample], batches: Sequence[list[int]]) -> list[str]:
    """What is wrong with the numbers of each step's samples, whatever order the stream claims:
    after each step all rows have been used equally often, or once more, and a mixture's sources
    have their shares to within one sample."""
    if kind == "mixture":
        return _check_shares(batches)
    used = Counter(dict.fromkeys(plain, 0))
    problems = []
    for step, batch in enumerate(batches, 1):
        used.update(batch)
        least = step * len(batch) // len(plain)
        if used.keys() != plain.keys() or not {*used.values()} <= {least, least + 1}:
            problems.append(f"order: until step {step} not each row has been used {least} times")
    return problems


def _check_shares(batches: Sequence[list[int]]) -> list[str]:
    weights = {name: weight for name, (_, weight) in SHARES.items()}
    counts, due = Counter[str](), Counter[str]()
    problems = []
    for step, batch in enumerate(batches):
        if step in CHANGES:
            weights |= CHANGES[step]
            counts, due = Counter(), Counter()
        counts.update(map(_source_of, batch))
        for name, weight in weights.items():
            due[name] += weight / sum(weights.values()) * len(batch)
            if abs(counts[name] - due[name]) >= 1:
                problems.append(
                    f"order: {counts[name]} samples of {name} until step {step + 1}, "
                    f"where {due[name]:.1f} are due"
                )
    return problems


def _source_of(number: int) -> str:
    end = 0
    for name, (count, _) in SHARES.items():
        end += count
        if number < end:
            return name
    raise ValueError(f"there is no sample {number}")

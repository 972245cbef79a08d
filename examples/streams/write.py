"""Writes the text of Python's standard library as the shards of two sources, to a folder or bucket.

    python -m examples.streams.write --to data/streams

writes `code/`, Parquet files of the modules' source, and `docs/`, compressed JSON lines of their
docstrings. A row is a piece of at most `--piece` bytes of text, which ends with a line.
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from examples.gpt.prepare import source_files

ROWS_PER_FILE = 8192
ROWS_PER_GROUP = 512  # a row group is a block of the stream


def write(target: str, source: Path | None = None, piece_bytes: int = 128) -> dict[str, int]:
    """Writes both sources, and returns the number of rows of each.

    Args:
        target: a folder, or a URL such as `s3://bucket/stdlib`, whose bucket is made if need be.
        source: a folder with `*.py`; default: the standard library of this Python.
    """
    store, top = _open(target)
    source = source or Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text("utf-8", "replace") for path in source_files(source)]
    code = [piece for text in texts for piece in pieces(text, piece_bytes)]
    docs = [
        piece for text in texts for doc in docstrings(text) for piece in pieces(doc, piece_bytes)
    ]
    for name in ("code", "docs"):
        store.create_dir(f"{top}/{name}", recursive=True)
    for number, rows in enumerate(_batches(code)):
        path = f"{top}/code/{number:05}.parquet"
        table = pa.table({"text": rows})
        pq.write_table(table, path, filesystem=store, row_group_size=ROWS_PER_GROUP)
    for number, rows in enumerate(_batches(docs)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in rows)
        path = f"{top}/docs/{number:05}.jsonl.gz"
        with store.open_output_stream(path, compression="gzip") as file:
            file.write(lines.encode())
    return {"code": len(code), "docs": len(docs)}


def pieces(text: str, limit: int) -> Iterator[str]:
    """Whole lines of at most `limit` bytes together; a longer line alone, cut."""
    piece = ""
    for line in text.splitlines(keepends=True):
        if piece and len((piece + line).encode()) > limit:
            yield piece
            piece = ""
        piece += line.encode()[:limit].decode("utf-8", "ignore") if not piece else line
    if piece:
        yield piece


def docstrings(text: str) -> Iterator[str]:
    """The docstrings of a module and of all in it; none of what is not Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (doc := ast.get_docstring(node)):
            yield doc + "\n"


def _batches(rows: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(rows), ROWS_PER_FILE):
        yield rows[first : first + ROWS_PER_FILE]


def _open(target: str) -> tuple[fs.FileSystem, str]:
    if "://" not in target:
        return fs.LocalFileSystem(), str(Path(target).absolute())
    if target.startswith("s3://"):
        target += f"{'&' if '?' in target else '?'}allow_bucket_creation=true"
    store, top = fs.FileSystem.from_uri(target)
    return store, top.rstrip("/")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="the standard library as shards of two sources")
    parser.add_argument("--to", required=True, help="a folder, or an s3://, gs:// or hdfs:// URL")
    parser.add_argument("--from", dest="source", type=Path, help="a folder with *.py")
    parser.add_argument("--piece", type=int, default=128, help="bytes of a row, at most")
    options = parser.parse_args(arguments)
    for name, rows in write(options.to, options.source, options.piece).items():
        print(f"{name}: {rows:,} rows")


if __name__ == "__main__":
    main()

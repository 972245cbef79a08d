"""Prepares the source of Python's standard library as Parquet token shards.

    python -m examples.gpt.prepare --out data/stdlib

writes `train/` and `validation/`, split by file. A token is a byte, and every file is followed by a
zero byte. Does nothing if the folder is up to date.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import platform
import shutil
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayzero.engine.errors import DataError

SPLITS = ("train", "validation")
SEPARATOR = b"\0"
VALIDATION_PERCENT = 5
SHARD_TOKENS = 4 << 20
ROW_GROUP_TOKENS = 256 << 10  # decoded at once to read a sample
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def prepare(out: Path, source: Path | None = None) -> dict[str, Any]:
    """Write the shards of every `*.py` under `source` to `out`, unless they already exist.

    Safe to call concurrently from many processes: each writes a temporary folder, and only one
    rename succeeds.

    Args:
        out: the output folder, which must not contain other files.
        source: defaults to the standard library of this Python.

    Returns:
        metadata: `settings`, and `files` and `tokens` by split.

    Raises:
        DataError: no source files, or `out` is in use for something else.
    """
    source = source or Path(sysconfig.get_path("stdlib"))
    settings = {
        "python": platform.python_version(),
        "source": str(source),
        "validation_percent": VALIDATION_PERCENT,
        "shard_tokens": SHARD_TOKENS,
        "row_group_tokens": ROW_GROUP_TOKENS,
    }
    metadata = _read_metadata(out)
    if metadata and metadata["settings"] == settings:
        print(f"data: {out} is up to date", flush=True)
        return metadata
    if _has_other_files(out):
        raise DataError(f"{out} contains other files", "a new or empty folder", "--out")

    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.parent / f".{out.name}-{uuid.uuid4().hex}"  # same file system, for the rename
    try:
        metadata = {"settings": settings, **_write(draft, source)}
        (draft / "meta.json").write_text(json.dumps(metadata, indent=2))
        _publish(draft, out, settings)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    tokens, files = metadata["tokens"], metadata["files"]
    for split in SPLITS:
        print(f"data: {out}/{split}: {tokens[split]:,} bytes of {files[split]} files", flush=True)
    return metadata


def source_files(source: Path) -> Iterator[Path]:
    """Yield the `*.py` files under `source`, sorted, without tests and installed packages."""
    for folder, subfolders, names in os.walk(source):
        subfolders[:] = sorted(set(subfolders) - EXCLUDED_FOLDERS)
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix == ".py" and path.is_file():
                yield path


def assign_split(name: str) -> str:
    """`train` or `validation`, by a hash of the file's name: identical on every machine."""
    digest = hashlib.sha256(name.encode()).digest()
    bucket = int.from_bytes(digest[:8], "big") % 100
    return "validation" if bucket < VALIDATION_PERCENT else "train"


def _write(folder: Path, source: Path) -> dict[str, Any]:
    text = {split: bytearray() for split in SPLITS}
    files = dict.fromkeys(SPLITS, 0)
    for path in source_files(source):
        split = assign_split(path.relative_to(source).as_posix())
        text[split] += path.read_bytes() + SEPARATOR  # raw bytes, of any encoding
        files[split] += 1
    if not files["train"]:
        raise DataError(f"no *.py files under {source}", "a folder of Python source", "the source")
    for split, tokens in text.items():
        (folder / split).mkdir(parents=True)
        for number, start in enumerate(range(0, len(tokens), SHARD_TOKENS)):
            shard = np.frombuffer(tokens, np.uint8)[start : start + SHARD_TOKENS]
            pq.write_table(
                pa.table({"tokens": shard}),
                folder / split / f"{number:05}.parquet",
                row_group_size=ROW_GROUP_TOKENS,
                compression="zstd",
            )
    return {"files": files, "tokens": {split: len(tokens) for split, tokens in text.items()}}


def _publish(draft: Path, out: Path, settings: dict[str, Any]) -> None:
    """Rename `draft` to `out`, unless another process has published the same data."""
    while True:
        metadata = _read_metadata(out)
        if metadata and metadata["settings"] == settings:
            return
        try:
            os.rename(draft, out)  # atomic; fails if `out` exists and is not empty
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        stale = draft.with_name(draft.name + "-stale")
        try:
            os.rename(out, stale)
        except FileNotFoundError:
            continue  # another process has moved it
        for split in SPLITS:  # meta.json is removed last: see _has_other_files
            shutil.rmtree(stale / split, ignore_errors=True)
        shutil.rmtree(stale)


def _has_other_files(out: Path) -> bool:
    """Whether `out` has files not written by `prepare`. A single listing: it may be replaced."""
    try:
        names = os.listdir(out)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return True
    return bool(names) and "meta.json" not in names


def _read_metadata(out: Path) -> dict[str, Any] | None:
    """Metadata written by `prepare`; None if `out` was not written by it."""
    try:
        metadata = json.loads((out / "meta.json").read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return metadata if isinstance(metadata, dict) and "settings" in metadata else None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Python's standard library as token shards")
    parser.add_argument("--out", type=Path, default=Path("data/stdlib"))
    prepare(parser.parse_args().out)

"""The source of Python's standard library as Parquet token shards: text that every machine has.

    python -m examples.gpt.prepare --out data/stdlib

makes `train/` and `validation/` there, split by file. A token is a byte; a zero byte follows every
file. Nothing is done when the folder is up to date.
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
ROW_GROUP_TOKENS = 256 << 10  # what is decoded at once to read one sample
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def prepare(out: Path, source: Path | None = None) -> dict[str, Any]:
    """Writes the shards of every `*.py` under `source` to `out`, unless they are there already.

    Any number of processes may do this at once: each builds a folder of its own, one rename wins,
    and the others drop theirs.

    Args:
        out: the folder to make. One that holds anything else is refused.
        source: the standard library of this Python by default.

    Returns:
        what was written: `settings`, and `files` and `tokens` by split.

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
    made = _made(out)
    if made and made["settings"] == settings:
        print(f"data: {out} is up to date", flush=True)
        return made
    if _foreign(out):
        raise DataError(f"{out} holds something else", "a new or empty folder", "--out")

    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.parent / f".{out.name}-{uuid.uuid4().hex}"  # the same file system: renames work
    try:
        made = {"settings": settings, **_write(draft, source)}
        (draft / "meta.json").write_text(json.dumps(made, indent=2))
        _publish(draft, out, settings)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    tokens, files = made["tokens"], made["files"]
    for split in SPLITS:
        print(f"data: {out}/{split}: {tokens[split]:,} bytes of {files[split]} files", flush=True)
    return made


def source_files(source: Path) -> Iterator[Path]:
    """The `*.py` files under `source`, sorted, without tests and what others installed there."""
    for folder, subfolders, names in os.walk(source):
        subfolders[:] = sorted(set(subfolders) - LEFT_OUT)
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix == ".py" and path.is_file():
                yield path


def split_of(name: str) -> str:
    """`train` or `validation`, by a hash of the file's name alone: the same on every machine."""
    digest = hashlib.sha256(name.encode()).digest()
    bucket = int.from_bytes(digest[:8], "big") % 100
    return "validation" if bucket < VALIDATION_PERCENT else "train"


def _write(folder: Path, source: Path) -> dict[str, Any]:
    text = {split: bytearray() for split in SPLITS}
    files = dict.fromkeys(SPLITS, 0)
    for path in source_files(source):
        split = split_of(path.relative_to(source).as_posix())
        text[split] += path.read_bytes() + SEPARATOR  # bytes as they are: any encoding is fine
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
    """Renames `draft` to `out`. Losing the race to somebody with the same data is a success."""
    while True:
        made = _made(out)
        if made and made["settings"] == settings:
            return
        try:
            os.rename(draft, out)  # atomic; fails when `out` is there and not empty
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        stale = draft.with_name(draft.name + "-stale")
        try:
            os.rename(out, stale)
        except FileNotFoundError:
            continue  # somebody else has moved it away
        for split in SPLITS:  # meta.json goes last: see _foreign
            shutil.rmtree(stale / split, ignore_errors=True)
        shutil.rmtree(stale)


def _foreign(out: Path) -> bool:
    """Whether `out` holds what `prepare` did not write, by one look: others may replace it now."""
    try:
        names = os.listdir(out)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return True
    return bool(names) and "meta.json" not in names


def _made(out: Path) -> dict[str, Any] | None:
    """What `prepare` wrote about `out`, or None when `out` is not its work."""
    try:
        made = json.loads((out / "meta.json").read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return made if isinstance(made, dict) and "settings" in made else None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Python's standard library as token shards")
    parser.add_argument("--out", type=Path, default=Path("data/stdlib"))
    prepare(parser.parse_args().out)

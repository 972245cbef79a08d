"""A job's log in its files, and reading it bit by bit from where one was."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rayzero.engine.masking import masked

LOG_MAX_BYTES = 256 * 2**20
"""A log that has grown so big becomes `job.log.1`, and a new one is begun."""
_PART_BYTES = 256 * 1024


@dataclass(frozen=True)
class Place:
    """In which file one was, and at which byte of it. The beginning, by default."""

    inode: int = 0
    offset: int = 0


def log_path(output_dir: Path) -> Path:
    return output_dir / "logs" / "job.log"


def read_log(path: Path, place: Place) -> tuple[bytes, Place]:
    """What follows, and where that ends; nothing at the log's end, or where there is none."""
    with ExitStack() as opened:
        files = []
        for one in (_older(path), path):
            try:
                files.append(opened.enter_context(one.open("rb")))
            except FileNotFoundError:
                continue
        inodes = [os.fstat(file.fileno()).st_ino for file in files]
        begin = inodes.index(place.inode) if place.inode in inodes else 0
        for inode, file in list(zip(inodes, files, strict=True))[begin:]:
            offset = place.offset if inode == place.inode else 0
            file.seek(offset)
            if part := file.read(_PART_BYTES):
                return part, Place(inode, offset + len(part))
    return b"", place


def append_log(path: Path, lines: Sequence[str]) -> None:
    """Without what looks like a secret in a URL. May raise OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > LOG_MAX_BYTES:
        os.replace(path, _older(path))
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.writelines(f"{masked(line)}\n" for line in lines)


def lines(found: Iterable[bytes], rank: int | None = None) -> Iterator[str]:
    """Whole lines, without their ends; of one rank, or all.

    Args:
        found: parts of a log as they come; an empty one when there is nothing new.
    """
    begin = "" if rank is None else f"[rank {rank}] "
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    for part in found:
        *whole, rest = (rest + decoder.decode(part)).split("\n")
        yield from (line for line in whole if line.startswith(begin))
    if rest and rest.startswith(begin):
        yield rest


def _older(path: Path) -> Path:
    return path.with_suffix(".log.1")

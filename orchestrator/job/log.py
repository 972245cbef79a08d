"""A job's log in its files, and reading it bit by bit from where one was."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rayzero.engine.redact import redact_url

LOG_MAX_BYTES = 256 * 2**20
"""A log that has grown so big becomes `job.log.1`, and a new one is begun."""


_READ_BYTES = 256 * 1024


_GAP_MESSAGE = b"\n(lines may be missing here: the log grew faster than it was read)\n"


@dataclass(frozen=True)
class LogPosition:
    """In which file one was, and at which byte of it. The beginning, by default."""

    inode: int = 0
    offset: int = 0


def log_path(output_dir: Path) -> Path:
    return output_dir / "logs" / "job.log"


def read_log(path: Path, place: LogPosition) -> tuple[bytes, LogPosition]:
    """What follows, and where that ends; nothing at the log's end, or where there is none.

    Who is so late that its file is gone is told so, in a line, and goes on with what is left.
    """
    with ExitStack() as opened:
        files: dict[int, BinaryIO] = {}
        # The newer one first: if it becomes the older one meanwhile, it is not missed.
        for one in (path, _rotated_path(path)):
            with suppress(FileNotFoundError):
                file = opened.enter_context(one.open("rb"))
                files.setdefault(os.fstat(file.fileno()).st_ino, file)
        inodes = list(files)[::-1]
        late = place.inode not in (0, *inodes)
        for inode in inodes[inodes.index(place.inode) :] if place.inode in inodes else inodes:
            offset = place.offset if inode == place.inode else 0
            files[inode].seek(offset)
            if part := files[inode].read(_READ_BYTES):
                return _GAP_MESSAGE * late + part, LogPosition(inode, offset + len(part))
    return b"", place


def append_log(path: Path, lines: Sequence[str]) -> None:
    """Without what looks like a secret in a URL. May raise OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > LOG_MAX_BYTES:
        _rotate(path)
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.writelines(f"{redact_url(line)}\n" for line in lines)


def iter_log_lines(found: Iterable[bytes], rank: int | None = None) -> Iterator[str]:
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


def _rotate(path: Path) -> None:
    """The new file is made while the oldest still is there, or it might get that one's inode: a
    reader that is still there would take it for the file in which it was."""
    new = path.with_suffix(".log.new")
    new.touch()
    os.replace(path, _rotated_path(path))
    os.replace(new, path)


def _rotated_path(path: Path) -> Path:
    return path.with_suffix(".log.1")

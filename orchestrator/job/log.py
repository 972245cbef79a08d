"""A job's log file with rotation, and incremental reading from a position."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rayzero.engine.redact import redact_url

LOG_MAX_BYTES = 256 * 2**20  # a log of this size becomes `job.log.1`, and a new one is started
_READ_BYTES = 256 * 1024
_MAX_LINE_CHARACTERS = 2**20  # a longer line, which this module does not write, is split
_BEFORE_BYTES = 128
_GAP_MESSAGE = b"\n(lines may be missing here: the log grew faster than it was read)\n"


@dataclass(frozen=True)
class LogPosition:
    """A byte offset in a log file. By default the beginning of the log.

    Attributes:
        before: the bytes before the offset, at most 128. They identify the file together with its
            inode number, because file systems reuse the numbers of deleted files: after two
            rotations another file can have the same number.
    """

    inode: int = 0
    offset: int = 0
    before: bytes = b""


def read_log(
    path: Path, position: LogPosition, max_bytes: int = _READ_BYTES
) -> tuple[bytes, LogPosition]:
    """Returns the next part after a position, of at most `max_bytes`, and the position after the
    part. The part is empty at the log's end.

    If rotation has deleted the file of that position, the part begins with a line that says so, and
    continues with the oldest file that is left.
    """
    with ExitStack() as opened:
        files: dict[int, BinaryIO] = {}
        # The newer file is opened first, so that it is not missed if it is rotated meanwhile.
        for log_file in (path, _rotated_path(path)):
            with suppress(FileNotFoundError):
                file = opened.enter_context(log_file.open("rb"))
                files.setdefault(os.fstat(file.fileno()).st_ino, file)
        inodes = list(files)[::-1]
        is_found = (
            position.inode in files
            and _position(files[position.inode], position.offset) == position
        )
        start = inodes.index(position.inode) if is_found else 0
        for inode in inodes[start:]:
            offset = position.offset if is_found and inode == position.inode else 0
            files[inode].seek(offset)
            if part := files[inode].read(max_bytes):
                gap = b"" if is_found or position.inode == 0 else _GAP_MESSAGE
                return gap + part, _position(files[inode], offset + len(part))
    return b"", position


def end_of_log(path: Path) -> LogPosition:
    """Returns the position of the log's current end."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        return _position(file, file.seek(0, os.SEEK_END))
    return LogPosition()


def _position(file: BinaryIO, offset: int) -> LogPosition:
    begin = max(0, offset - _BEFORE_BYTES)
    before = os.pread(file.fileno(), offset - begin, begin)
    return LogPosition(os.fstat(file.fileno()).st_ino, offset, before)


def append_log(
    path: Path, lines: Sequence[str], *, parents: bool = True, max_bytes: int = LOG_MAX_BYTES
) -> int:
    """Appends lines, with credentials in URLs redacted. Returns the number of bytes written. May
    raise OSError.

    Args:
        parents: also makes the parents of the log's folder.
        max_bytes: a larger log is rotated first.
    """
    path.parent.mkdir(parents=parents, exist_ok=True)
    if path.exists() and path.stat().st_size > max_bytes:
        _rotate(path)
    content = "".join(f"{redact_url(line)}\n" for line in lines).encode("utf-8", "replace")
    with path.open("ab") as file:
        return file.write(content)


def iter_log_lines(
    parts: Iterable[bytes], rank: int | None = None, role: str = ""
) -> Iterator[str]:
    """Yields complete lines without their line ends: those of one rank, of one role, or all lines.

    Args:
        parts: the parts of a log in order; an empty part means that there is nothing new.
    """
    prefix = f"[{role or 'rank'} " if role or rank is not None else ""
    prefix += "" if rank is None else f"{rank}] "
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    for part in parts:
        *lines, rest = (rest + decoder.decode(part)).split("\n")
        if len(rest) > _MAX_LINE_CHARACTERS:
            lines.append(rest)
            rest = ""
        yield from (line for line in lines if line.startswith(prefix))
    if rest and rest.startswith(prefix):
        yield rest


def _rotate(path: Path) -> None:
    """Renames the log to `job.log.1`, and begins a new one. The new file is created first, so that
    the log is missing only between the two renames."""
    new = path.with_suffix(".log.new")
    new.touch()
    os.replace(path, _rotated_path(path))
    os.replace(new, path)


def _rotated_path(path: Path) -> Path:
    return path.with_suffix(".log.1")

"""Reading a job's log in parts, also during rotation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.job.log import LogPosition, append_log, iter_log_lines, read_log

append_small = partial(append_log, max_bytes=20)


def read_all(path: Path, position: LogPosition) -> tuple[bytes, LogPosition]:
    content = b""
    while True:
        part, position = read_log(path, position)
        if not part:
            return content, position
        content += part


def test_log_is_read_from_position(tmp_path: Path):
    path = tmp_path / "logs" / "job.log"
    assert read_log(path, LogPosition()) == (b"", LogPosition())
    append_log(path, ["one", "two"])
    content, position = read_all(path, LogPosition())
    assert content == b"one\ntwo\n"
    assert read_all(path, position) == (b"", position)
    append_log(path, ["three"])
    assert read_all(path, position)[0] == b"three\n"


def test_rotation_loses_no_lines(tmp_path: Path):
    path = tmp_path / "logs" / "job.log"
    position, content = LogPosition(), b""
    for number in range(12):
        append_small(path, [f"line {number}"])
        part, position = read_log(path, position, max_bytes=8)  # falls behind by less than a file
        content += part
    rest, _ = read_all(path, position)
    assert (content + rest).decode().splitlines() == [f"line {number}" for number in range(12)]
    content, _ = read_all(path, LogPosition())  # of the two files that are kept
    assert content.decode().splitlines()[-1] == "line 11"
    assert content.decode().startswith("line ")


def test_rotation_while_log_is_opened_loses_no_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "logs" / "job.log"
    append_small(path, ["the oldest, to be deleted"])
    append_small(path, ["one"])
    _, position = read_all(path, LogPosition())
    append_small(path, ["two, and now it is long enough"])
    opened, opening = [], Path.open

    def open_(file: Path, mode: str) -> Any:
        content = opening(file, mode)
        opened.append(file)
        if len(opened) == 1:  # between the two files that a reader opens
            with monkeypatch.context() as real:
                real.setattr(Path, "open", opening)
                append_small(path, ["three"])
        return content

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_)
        part, position = read_log(path, position)
    assert len(opened) == 2
    assert part + read_all(path, position)[0] == b"two, and now it is long enough\nthree\n"


@pytest.mark.parametrize("reused", [0, 1, None])
def test_reader_of_a_deleted_file_is_told(reused: int | None, tmp_path: Path):
    """File systems reuse the inode numbers of deleted files: the oldest that is left may have it,
    or the newest, or none."""
    path = tmp_path / "logs" / "job.log"
    append_small(path, ["the oldest, to be deleted"])
    _, position = read_all(path, LogPosition())
    append_small(path, ["one, to be rotated only"])
    append_small(path, ["two"])
    inodes = [file.stat().st_ino for file in (path.with_suffix(".log.1"), path)]
    inode = inodes[reused] if reused is not None else max(inodes) + 1
    content, _ = read_all(path, replace(position, inode=inode))
    gap, rest = content.strip().split(b"\n", 1)
    assert b"may be missing here" in gap
    assert rest == b"one, to be rotated only\ntwo"
    assert b"missing" not in read_all(path, LogPosition())[0]


@given(
    st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]))),
    st.lists(st.integers(0, 200)),
)
def test_lines_are_complete_for_any_parts(texts: list[str], cuts: list[int]):
    data = "".join(f"{text}\n" for text in texts).encode()
    ends = [0, *sorted({min(cut, len(data)) for cut in cuts}), len(data)]
    parts = [data[a:b] for a, b in pairwise(ends)]
    assert list(iter_log_lines(parts)) == texts


def test_log_lines_of_a_rank():
    content = [b"[rank 1] a\nstate: running\n[rank 10] b\n", b"", b"[rank 1] c\n[rank 1] d"]
    assert list(iter_log_lines(content, 1)) == ["[rank 1] a", "[rank 1] c", "[rank 1] d"]


def test_credentials_in_url_are_not_logged(tmp_path: Path):
    append_log(tmp_path / "logs" / "job.log", ["see s3://me:pass@bucket/x"])
    assert b"pass" not in (tmp_path / "logs" / "job.log").read_bytes()

"""A job's log, read bit by bit, also while a new file is begun."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.job import log as log_module
from rayzero.orchestrator.job.log import LogPosition, append_log, iter_log_lines, read_log


def all_from(path: Path, place: LogPosition) -> tuple[bytes, LogPosition]:
    found = b""
    while True:
        part, place = read_log(path, place)
        if not part:
            return found, place
        found += part


def test_all_of_it_from_the_beginning_and_then_what_comes(tmp_path: Path):
    path = tmp_path / "logs" / "job.log"
    assert read_log(path, LogPosition()) == (b"", LogPosition())
    append_log(path, ["one", "two"])
    found, place = all_from(path, LogPosition())
    assert found == b"one\ntwo\n"
    assert all_from(path, place) == (b"", place)
    append_log(path, ["three"])
    assert all_from(path, place)[0] == b"three\n"


def test_nothing_is_missed_when_a_new_file_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(log_module, "LOG_MAX_BYTES", 20)
    monkeypatch.setattr(log_module, "_READ_BYTES", 8)
    path = tmp_path / "logs" / "job.log"
    place, found = LogPosition(), b""
    for number in range(12):
        append_log(path, [f"line {number}"])
        part, place = read_log(path, place)  # falls behind by less than a file
        found += part
    rest, _ = all_from(path, place)
    assert (found + rest).decode().splitlines() == [f"line {number}" for number in range(12)]
    whole, _ = all_from(path, LogPosition())  # two files are kept
    assert whole.decode().splitlines()[-1] == "line 11"
    assert whole.decode().startswith("line ")


def test_a_file_begun_while_the_log_is_being_opened_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(log_module, "LOG_MAX_BYTES", 20)
    path = tmp_path / "logs" / "job.log"
    append_log(path, ["the oldest, which goes"])
    append_log(path, ["one"])
    _, place = all_from(path, LogPosition())
    append_log(path, ["two, and now it is long enough"])
    opened, opening = [], Path.open

    def open_(file: Path, mode: str) -> Any:
        found = opening(file, mode)
        opened.append(file)
        if len(opened) == 1:  # between the two that a reader opens
            with monkeypatch.context() as real:
                real.setattr(Path, "open", opening)
                append_log(path, ["three"])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_)
        part, place = read_log(path, place)
    assert len(opened) == 2
    assert part + all_from(path, place)[0] == b"two, and now it is long enough\nthree\n"


def test_a_new_file_is_not_taken_for_the_one_that_made_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A late reader's file is gone; file systems give a new file the number of one that is gone."""
    monkeypatch.setattr(log_module, "LOG_MAX_BYTES", 20)
    path = tmp_path / "logs" / "job.log"
    append_log(path, ["the oldest, which goes"])
    _, place = all_from(path, LogPosition())
    append_log(path, ["one, which stays for now"])
    append_log(path, ["two"])
    assert path.stat().st_ino != place.inode
    found, _ = all_from(path, place)
    told, rest = found.strip().split(b"\n", 1)
    assert b"may be missing here" in told
    assert rest == b"one, which stays for now\ntwo"
    assert b"missing" not in all_from(path, LogPosition())[0]


@given(
    st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]))),
    st.lists(st.integers(0, 200)),
)
def test_lines_are_whole_wherever_the_parts_end(texts: list[str], cuts: list[int]):
    content = "".join(f"{text}\n" for text in texts).encode()
    ends = [0, *sorted({min(cut, len(content)) for cut in cuts}), len(content)]
    parts = [content[a:b] for a, b in pairwise(ends)]
    assert list(iter_log_lines(parts)) == texts


def test_the_lines_of_one_rank():
    content = [b"[rank 1] a\nstate: running\n[rank 10] b\n", b"", b"[rank 1] c\n[rank 1] d"]
    assert list(iter_log_lines(content, 1)) == ["[rank 1] a", "[rank 1] c", "[rank 1] d"]


def test_a_secret_of_a_url_is_not_written(tmp_path: Path):
    append_log(tmp_path / "logs" / "job.log", ["see s3://me:pass@bucket/x"])
    assert b"pass" not in (tmp_path / "logs" / "job.log").read_bytes()

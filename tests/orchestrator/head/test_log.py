"""A job's log, read bit by bit, also while a new file is begun."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.head import log as log_module
from rayzero.orchestrator.head.log import Place, append_log, lines, log_path, read_log


def all_from(path: Path, place: Place) -> tuple[bytes, Place]:
    found = b""
    while True:
        part, place = read_log(path, place)
        if not part:
            return found, place
        found += part


def test_all_of_it_from_the_beginning_and_then_what_comes(tmp_path: Path):
    path = log_path(tmp_path)
    assert read_log(path, Place()) == (b"", Place())
    append_log(path, ["one", "two"])
    found, place = all_from(path, Place())
    assert found == b"one\ntwo\n"
    assert all_from(path, place) == (b"", place)
    append_log(path, ["three"])
    assert all_from(path, place)[0] == b"three\n"


def test_nothing_is_missed_when_a_new_file_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(log_module, "LOG_MAX_BYTES", 20)
    monkeypatch.setattr(log_module, "_PART_BYTES", 8)
    path = log_path(tmp_path)
    place, found = Place(), b""
    for number in range(12):
        append_log(path, [f"line {number}"])
        part, place = read_log(path, place)  # falls behind by less than a file
        found += part
    rest, _ = all_from(path, place)
    assert (found + rest).decode().splitlines() == [f"line {number}" for number in range(12)]
    whole, _ = all_from(path, Place())  # two files are kept
    assert whole.decode().splitlines()[-1] == "line 11"
    assert whole.decode().startswith("line ")


@given(
    st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]))),
    st.lists(st.integers(0, 200)),
)
def test_lines_are_whole_wherever_the_parts_end(texts: list[str], cuts: list[int]):
    content = "".join(f"{text}\n" for text in texts).encode()
    ends = [0, *sorted({min(cut, len(content)) for cut in cuts}), len(content)]
    parts = [content[a:b] for a, b in pairwise(ends)]
    assert list(lines(parts)) == texts


def test_the_lines_of_one_rank():
    content = [b"[rank 1] a\nstate: running\n[rank 10] b\n", b"", b"[rank 1] c\n[rank 1] d"]
    assert list(lines(content, 1)) == ["[rank 1] a", "[rank 1] c", "[rank 1] d"]


def test_a_secret_of_a_url_is_not_written(tmp_path: Path):
    append_log(log_path(tmp_path), ["see s3://me:pass@bucket/x"])
    assert b"pass" not in log_path(tmp_path).read_bytes()

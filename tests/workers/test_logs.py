from __future__ import annotations

import io
import sys

import pytest

from rayzero.workers.output import LineTee, tee_output


def tee() -> tuple[LineTee, io.StringIO, list[tuple[str, str]]]:
    lines: list[tuple[str, str]] = []
    file = io.StringIO()
    return LineTee(file, "stdout", lambda *line: lines.append(line)), file, lines


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (["a\n"], ["a"]),
        (["a", "b\nc", "\n"], ["ab", "c"]),
        (["a\n\nb\n"], ["a", "", "b"]),
        (["1%\r2%\r3%\n"], ["3%"]),
        (["dos\r\n"], ["dos"]),
        (["no end"], []),
    ],
)
def test_lines_are_handed_over_when_they_end(written: list[str], lines: list[str]):
    stream, file, seen = tee()
    for text in written:
        assert stream.write(text) == len(text)
    assert [text for _, text in seen] == lines
    assert file.getvalue() == "".join(written)


def test_the_last_line_needs_no_end():
    stream, _, seen = tee()
    stream.write("half")
    stream.finish_line()
    stream.finish_line()
    assert seen == [("stdout", "half")]


def test_both_streams_are_replaced_and_put_back():
    before = sys.stdout, sys.stderr
    seen: list[tuple[str, str]] = []
    with tee_output(lambda *line: seen.append(line)):
        print("out")
        print("err", file=sys.stderr)
    assert seen == [("stdout", "out"), ("stderr", "err")]
    assert (sys.stdout, sys.stderr) == before

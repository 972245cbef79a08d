from __future__ import annotations

import io
import sys
from threading import Thread
from time import monotonic

import pytest

from rayzero.workers.messages import Joined, LogLine, StepReport
from rayzero.workers.output import LineTee, Outbox, tee_output


def line(text: str) -> LogLine:
    return LogLine(0, "stdout", text)


def test_messages_are_polled_once_and_in_order():
    outbox = Outbox(linger_s=0)
    messages = [line("a"), StepReport(1, 0, 1), Joined(1, 0), line("b")]
    for message in messages:
        outbox.post(message)
    assert outbox.poll(1) == messages
    assert outbox.poll(0) == []


def test_poll_waits_for_first_message():
    outbox = Outbox(linger_s=0)
    polled: list[object] = []
    poll = Thread(target=lambda: polled.extend(outbox.poll(10)))
    poll.start()
    outbox.post(Joined(1, 0))
    poll.join(5)
    assert polled == [Joined(1, 0)]


def test_urgent_message_ends_linger():
    outbox = Outbox(linger_s=30)
    outbox.post(Joined(1, 0))
    outbox.post(line("after it"))
    start_s = monotonic()
    assert len(outbox.poll(30)) == 2
    assert monotonic() - start_s < 5


def test_only_oldest_lines_are_dropped_and_counted():
    outbox = Outbox(max_lines=2, linger_s=0)
    outbox.post(StepReport(1, 0, 1))
    for text in "abcd":
        outbox.post(line(text))
    polled = outbox.poll(0)
    assert polled[0] == LogLine(0, "stderr", "(2 earlier lines were dropped)")
    assert polled[1:] == [StepReport(1, 0, 1), line("c"), line("d")]
    outbox.post(line("e"))
    assert outbox.poll(0) == [line("e")]


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
def test_lines_are_forwarded_at_newline(written: list[str], lines: list[str]):
    stream, file, forwarded = tee()
    for text in written:
        assert stream.write(text) == len(text)
    assert [text for _, text in forwarded] == lines
    assert file.getvalue() == "".join(written)


def test_last_line_without_newline_is_forwarded():
    stream, _, forwarded = tee()
    stream.write("half")
    stream.finish_line()
    stream.finish_line()
    assert forwarded == [("stdout", "half")]


def test_both_streams_are_replaced(monkeypatch: pytest.MonkeyPatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    lines: list[tuple[str, str]] = []
    tee_output(lambda *line: lines.append(line))
    print("out")
    print("err", file=sys.stderr)
    assert lines == [("stdout", "out"), ("stderr", "err")]

from __future__ import annotations

import io
import sys
from threading import Thread
from time import monotonic, process_time

import pytest

from rayzero.workers import bounded_queue, output
from rayzero.workers.messages import Crashed, Joined, LogLine, StepReport
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


def test_only_oldest_lines_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounded_queue, "MAX_ITEMS", 2)
    outbox = Outbox(linger_s=0)
    outbox.post(StepReport(1, 0, 1))
    for text in "abcd":
        outbox.post(line(text))
    polled = outbox.poll(0)
    assert isinstance(polled[0], LogLine)
    assert polled[0].text.startswith("(2 lines, 0.0 MiB, are not in this log")
    assert polled[1:] == [StepReport(1, 0, 1), line("c"), line("d")]
    outbox.post(line("e"))
    assert outbox.poll(0) == [line("e")]


def test_lines_are_bounded_by_bytes():
    outbox = Outbox(linger_s=0)
    for number in range(1000):
        outbox.post(line(f"{number:016384}"))
    outbox.post(Joined(1, 0))
    notice, *lines, joined = outbox.poll(0)
    assert joined == Joined(1, 0)
    assert isinstance(notice, LogLine)
    assert f"({1000 - len(lines)} lines" in notice.text
    assert 0 < 16384 * len(lines) <= output.MAX_LINES_BYTES
    assert lines[-1] == line(f"{999:016384}")


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
        (["\r1%", "\r2%", "\r3%\r", "\n"], ["3%"]),
        (["ab\r", "cd\r\n"], ["cd"]),
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


def test_redrawn_line_costs_no_more_than_its_last_state():
    stream, _, forwarded = tee()
    bar = "\r 43%|########          | 43/100 [00:01<00:02, 33it/s]"
    start_s = process_time()
    for _ in range(20_000):
        stream.write(bar)
    assert process_time() - start_s < 5, "quadratic: over a minute"
    stream.finish_line()
    assert forwarded == [("stdout", bar[1:])]


def test_long_line_is_forwarded_in_parts_even_before_it_ends():
    stream, _, forwarded = tee()
    size = output.MAX_LINE_CHARACTERS
    stream.write("a" * size)
    assert not forwarded
    stream.write("b" * size + "c")
    assert [text for _, text in forwarded] == ["a" * size, "b" * size, "c"]
    stream.write("d" * (size + 1) + "\n")
    assert [text for _, text in forwarded][3:] == ["d" * size, "d"]


def test_both_streams_are_replaced(monkeypatch: pytest.MonkeyPatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    lines: list[tuple[str, str]] = []
    tee_output(lambda *line: lines.append(line))
    print("out")
    print("err", file=sys.stderr)
    assert lines == [("stdout", "out"), ("stderr", "err")]


def test_texts_of_exception_are_bounded():
    outbox = Outbox(linger_s=0)
    outbox.post(Crashed(1, 0, "user", 1, "x" * 10**6, "y" * 10**6 + "the last frame"))
    [crash] = outbox.poll(0)
    assert isinstance(crash, Crashed)
    assert len(crash.error) + len(crash.traceback) < 10**5
    assert crash.traceback.endswith("the last frame")

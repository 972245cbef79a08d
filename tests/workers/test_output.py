from __future__ import annotations

import gc
import io
import sys
from pathlib import Path
from threading import Thread
from time import monotonic, process_time
from typing import NamedTuple

import pytest
import ray
from ray.experimental import tqdm_ray

from rayzero.workers import output
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
    poll = Thread(target=lambda: polled.extend(outbox.poll(60)))
    poll.start()
    outbox.post(Joined(1, 0))
    poll.join(30)
    assert polled == [Joined(1, 0)]


def test_urgent_message_ends_linger():
    outbox = Outbox(linger_s=30)
    outbox.post(Joined(1, 0))
    outbox.post(line("after it"))
    start_s = monotonic()
    assert len(outbox.poll(30)) == 2
    assert monotonic() - start_s < 15


def test_only_oldest_lines_are_dropped_and_counted():
    outbox = Outbox(linger_s=0, max_lines=2)
    outbox.post(StepReport(1, 0, 1))
    for text in "abcd":
        outbox.post(line(text))
    polled = outbox.poll(0)
    assert isinstance(polled[0], LogLine)
    assert polled[0].text.startswith("(2 lines, 0.0 MiB, are not in this log")
    assert polled[1:] == [StepReport(1, 0, 1), line("c"), line("d")]
    outbox.post(line("e"))
    assert outbox.poll(0) == [line("e")]


def test_old_reports_lose_details_and_none_is_lost():
    outbox = Outbox(linger_s=0)
    gauges = {"loss": 1.0, "phases/data": 2.0}
    for step in range(1, output.MAX_DETAILED + 11):
        outbox.post(StepReport(1, 0, step, {"tokens": 3.0}, gauges, 4.0))
    reports = [message for message in outbox.poll(0) if isinstance(message, StepReport)]
    assert [report.step for report in reports] == [*range(1, output.MAX_DETAILED + 11)]
    assert [report.gauges for report in reports] == [{"loss": 1.0}] * 10 + [gauges] * (
        output.MAX_DETAILED
    )
    assert {report.counters["tokens"] for report in reports} == {3.0}


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


class Streams(NamedTuple):
    """A process's sys.stdout and sys.stderr, replaced by tees.

    Attributes:
        files: what they write through to.
        lines: what was passed on.
    """

    out: io.TextIOWrapper
    err: io.TextIOWrapper
    tees: tuple[LineTee, LineTee]
    files: tuple[io.BytesIO, io.BytesIO]
    lines: list[tuple[str, str]]

    @property
    def texts(self) -> list[str]:
        return [text for _, text in self.lines]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    files = io.BytesIO(), io.BytesIO()
    for name, file in zip(("stdout", "stderr"), files, strict=True):
        stream = io.TextIOWrapper(file, encoding="utf-8", newline="\n", line_buffering=True)
        monkeypatch.setattr(sys, name, stream)
    lines: list[tuple[str, str]] = []
    tees = tee_output(lambda *line: lines.append(line))
    out, err = sys.stdout, sys.stderr
    assert isinstance(out, io.TextIOWrapper)
    assert isinstance(err, io.TextIOWrapper)
    return Streams(out, err, tees, files, lines)


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
def test_lines_are_forwarded_at_newline(streams: Streams, written: list[str], lines: list[str]):
    for text in written:
        assert streams.out.write(text) == len(text)
    assert streams.texts == lines
    assert streams.files[0].getvalue() == "".join(written).encode()


def test_states_of_rays_progress_bars_are_not_lines(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
):
    """Ray Data prints them in a worker, for the driver of Ray's own log."""
    monkeypatch.setattr(sys, "stdout", streams.out)  # pytest's, meanwhile
    monkeypatch.setattr(ray._private.worker.global_worker, "mode", ray.WORKER_MODE)
    bar = tqdm_ray.tqdm(total=3, desc="reading")
    bar.update(2)
    bar.close()
    assert tqdm_ray.RAY_TQDM_MAGIC.encode() in streams.files[0].getvalue()
    streams.out.write("a\n")
    assert streams.texts == ["a"]


def test_redrawn_line_costs_no_more_than_its_last_state(streams: Streams):
    bar = "\r 43%|########          | 43/100 [00:01<00:02, 33it/s]"
    start_s = process_time()
    for _ in range(20_000):
        streams.out.write(bar)
    assert process_time() - start_s < 5, "quadratic: over a minute"
    streams.tees[0].finish_line()
    assert streams.lines == [("stdout", bar[1:])]


def test_long_line_is_forwarded_in_parts_even_before_it_ends(streams: Streams):
    size = output.MAX_LINE_CHARACTERS
    streams.out.write("a" * size)
    assert not streams.lines
    streams.out.write("b" * size + "c")
    assert streams.texts == ["a" * size, "b" * size, "c"]
    streams.out.write("d" * (size + 1) + "\n")
    assert streams.texts[3:] == ["d" * size, "d"]


def test_bytes_and_text_are_one_stream_in_order(streams: Streams):
    print("text", end=" ", file=streams.out)
    assert streams.out.buffer.write("and bytés\n".encode()) == 11
    streams.out.writelines(["more ", "text\n"])
    for byte in "é".encode():
        streams.out.buffer.write(bytes([byte]))
    streams.out.buffer.write(bytearray(b" \xff\n"))
    streams.out.write("\n")
    assert streams.texts == ["text and bytés", "more text", "é \\xff", ""]
    assert streams.files[0].getvalue() == "text and bytés\nmore text\né ".encode() + b"\xff\n\n"


def test_stream_has_what_pythons_own_has(streams: Streams, tmp_path: Path):
    for name, stream in (("<stdout>", streams.out), ("<stderr>", streams.err)):
        assert (stream.name, stream.encoding, stream.errors) == (name, "utf-8", "strict")
        assert (stream.newlines, stream.line_buffering, stream.isatty()) == (None, True, False)
        assert stream.writable()
        assert not stream.readable()
        stream.reconfigure(line_buffering=False, encoding="latin-1", errors="replace")
        assert (stream.encoding, stream.errors, stream.line_buffering) == (
            *("latin-1", "replace", False),
        )
        print("é €", file=stream)
    assert streams.texts == ["\\xe9 ?", "\\xe9 ?"]
    assert streams.files[0].getvalue() == b"\xe9 ?\n"
    with pytest.raises(io.UnsupportedOperation):  # BytesIO's
        streams.out.fileno()
    with pytest.raises(TypeError):
        streams.out.buffer.write("text")  # type: ignore[arg-type]
    with (tmp_path / "file").open("w") as target:
        assert LineTee(target, "stdout", lambda *_: None).fileno() == target.fileno()


def test_script_may_wrap_detach_and_close_its_stream(streams: Streams):
    """The process goes on: it is entered again, with the streams that it began with."""
    wrapper = io.TextIOWrapper(streams.out.buffer, encoding="utf-8", line_buffering=True)
    print("wrapped", file=wrapper)
    del wrapper
    gc.collect()
    with streams.err as err:
        err.write("in a context\n")
    streams.err.close()
    print("still open", file=streams.err)
    print("detached", file=io.TextIOWrapper(streams.out.detach()), flush=True)
    streams.tees[0].write(b"the end")
    streams.tees[0].finish_line()
    assert streams.texts == ["wrapped", "in a context", "still open", "detached", "the end"]


def test_texts_of_exception_are_bounded():
    outbox = Outbox(linger_s=0)
    outbox.post(Crashed(1, 0, "user", 1, "x" * 10**6, "y" * 10**6 + "the last frame"))
    [crash] = outbox.poll(0)
    assert isinstance(crash, Crashed)
    assert len(crash.error) + len(crash.traceback) < 10**5
    assert crash.traceback.endswith("the last frame")

"""A job's log in parts in its store: bounds, outages, killed controllers, damage, readers."""

from __future__ import annotations

import gzip
import threading
import time
import tracemalloc
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.store_local import LocalStore
from rayzero.engine.errors import ConfigError, DataError
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job import log_upload, stored_log
from rayzero.orchestrator.job.lease import LeaseLostError
from rayzero.orchestrator.job.log import append_log
from rayzero.orchestrator.job.log_upload import LogUpload
from rayzero.orchestrator.job.recorder import EventBuffer, JobRecorder
from rayzero.orchestrator.job.stored_log import StoredLog
from rayzero.orchestrator.job_events import CheckpointFailed, RunEnded
from rayzero.orchestrator.journal.files import read_journal
from rayzero.orchestrator.plan import JobPlan, make_plan
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.results import JobResult
from rayzero.orchestrator.spec import JobSpec
from rayzero.workers.messages import LogLine
from tests.orchestrator.support import begun, write_journal

MIB = 2**20


@pytest.fixture
def job_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobPlan:
    """Its store is another folder than that of its local files."""
    monkeypatch.chdir(tmp_path)
    checkpoint = {"path": f"file://{tmp_path}/store"}
    files = {"checkpoint": checkpoint, "records": {"interval_s": 0.1}}
    spec = JobSpec(name="job", entrypoint="m:f", **files)  # type: ignore[arg-type]
    return make_plan(spec, "m:f")


class LoggingProcess:
    """Appends to the log and its copy as a job's process does."""

    def __init__(self, job_plan: JobPlan, **options: Any) -> None:
        self.plan, self.options = job_plan, options
        self.warnings: list[str] = []
        self.upload = LogUpload(job_plan, self.warnings.append, lambda: None)

    def log(self, *lines: str, copy: bool = True) -> None:
        self.upload.logged_bytes += append_log(self.plan.log_path, lines, **self.options)
        if copy:
            self.upload.write([None])


def read_stored(job_plan: JobPlan) -> tuple[str, list[str]]:
    """The log, and the notes of what is missing."""
    notes: list[str] = []
    log = StoredLog(job_plan.spec.checkpoint.path, "job", notes.append)
    return b"".join(log.parts()).decode(), notes


def part_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "store/job/logs").iterdir())


def random_line(number: int) -> str:
    return f"[rank 0] {number} {sha256(str(number).encode()).hexdigest()}"


def test_parts_of_all_controllers_are_one_log(job_plan: JobPlan, tmp_path: Path) -> None:
    append_log(job_plan.log_path, ["of an earlier version: not in the store"])
    first, second = LoggingProcess(job_plan), None
    first.log("[rank 0] one", "[rank 1] é two")
    first.log("[rank 0] three")
    assert len(part_files(tmp_path)) == 1, "a part grows"
    assert gzip.decompress(part_files(tmp_path)[0].read_bytes()).decode().endswith("three\n")
    with job_plan.log_path.open("ab") as file:  # killed within a line
        file.write(b"[rank 0] fo")
    first.log(copy=True)
    second = LoggingProcess(job_plan)
    second.log("[rank 0] five")
    assert [path.name[:7] for path in part_files(tmp_path)] == ["000001-", "000002-"]
    text = "[rank 0] one\n[rank 1] é two\n[rank 0] three\n[rank 0] fo\n[rank 0] five\n"
    assert read_stored(job_plan) == (text, [])


def test_full_parts_do_not_change_and_the_oldest_are_removed(
    job_plan: JobPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_upload, "PART_BYTES", 600)
    process = LoggingProcess(job_plan)
    process.upload._max_bytes = 2400
    seen: dict[str, bytes] = {}
    for number in range(60):
        process.log(random_line(number))
        *full, _ = part_files(tmp_path)
        for path in full:
            assert seen.setdefault(path.name, path.read_bytes()) == path.read_bytes()
    assert sum(path.stat().st_size for path in part_files(tmp_path)) < 2400 + 800
    text, notes = read_stored(job_plan)
    lines = text.splitlines()
    assert 10 < len(lines) < 60
    assert lines == [random_line(number) for number in range(60 - len(lines), 60)]
    last_removed = len(seen) + 1 - len(part_files(tmp_path))
    (note,) = notes
    assert note.startswith(f"parts 1 to {last_removed} of the log are not there: the oldest")


def away(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The store takes nothing; until what this returns is called."""
    gone, replace = threading.Event(), LocalStore.replace
    gone.set()

    def fail(self: LocalStore, *args: Any) -> None:
        if gone.is_set():
            raise StoreError("slow", self.url, "timed out")
        replace(self, *args)

    monkeypatch.setattr(LocalStore, "replace", fail)
    return gone.clear


def test_outage_costs_nothing_that_the_disk_keeps(
    job_plan: JobPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that prints 100 MB while the store is away."""
    process = LoggingProcess(job_plan)
    come_back = away(monkeypatch)
    for batch in range(50):
        words = random_line(batch).split()[-1]
        process.log(*(f"[rank 0] {number} {words * 250}" for number in range(125)), copy=False)
    with pytest.raises(StoreError):
        process.upload.write([None])
    come_back()
    tracemalloc.start()
    process.upload.write([None])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 24 * MIB
    assert process.warnings == []
    text, notes = read_stored(job_plan)
    assert text.encode() == job_plan.log_path.read_bytes()
    assert len(text) > 99e6
    assert notes == []


def test_what_an_outage_loses_is_counted(
    job_plan: JobPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = LoggingProcess(job_plan, max_bytes=20_000)
    process.log("first")
    come_back = away(monkeypatch)
    for number in range(3000):
        process.log(random_line(number), copy=False)
    come_back()
    process.log("last")
    (warning,) = process.warnings
    text, _ = read_stored(job_plan)
    first, gap, *rest = text.splitlines()[0], text.splitlines()[1:3], *text.splitlines()[3:]
    assert first == "first"
    assert "lines may be missing here" in gap[1] + gap[0]
    assert rest[-1] == "last"
    kept = sum(len(line) + 1 for line in rest)
    assert kept < 45_000
    lost_bytes = sum(len(random_line(number)) + 1 for number in range(3000)) - kept
    assert warning.startswith(f"{lost_bytes / 1024:.0f} KiB of the job's log")
    process.log("more")
    assert len(process.warnings) == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damaged_part_is_named_and_the_rest_is_read(
    damage: str, job_plan: JobPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_upload, "PART_BYTES", 1)
    process = LoggingProcess(job_plan)
    for number in range(3):
        process.log(random_line(number))
    part = part_files(tmp_path)[1]
    content = bytearray(part.read_bytes())
    content[20] ^= 0xFF
    if damage == "gone":
        part.unlink()
    else:
        part.write_bytes(content if damage == "flip" else content[:-1])
    notes: list[str] = []
    log = StoredLog(job_plan.spec.checkpoint.path, "job", notes.append).parts()
    lines, error = [], None
    try:
        for lines_read in log:
            lines += lines_read.decode().splitlines()
    except DataError as raised:
        error = raised
    assert lines == [random_line(0), random_line(2)]
    if damage == "gone":
        assert (notes, error) == (["parts 2 to 2 of the log are not there"], None)
    else:
        assert part.name in str(error)
        assert part.name in notes[0]


def test_missing_job_and_missing_log_are_told_apart(job_plan: JobPlan, tmp_path: Path) -> None:
    path = job_plan.spec.checkpoint.path
    with pytest.raises(ConfigError, match="there is no journal in"):
        StoredLog(path, "job", print)
    (tmp_path / "store/job").mkdir(parents=True)
    write_journal(path + "/job", begun(job_plan))
    with pytest.raises(ConfigError, match=r"there is no journal in .*did you mean 'job'"):
        StoredLog(path, "jop", print)
    with pytest.raises(ConfigError, match="has no log of job 'job'"):
        StoredLog(path, "job", print)


def test_log_is_followed_until_the_end(job_plan: JobPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_log, "FOLLOW_POLL_S", 0.02)
    process, path = LoggingProcess(job_plan), job_plan.job_folder
    process.log("one")
    write_journal(path, begun(job_plan))
    parts = StoredLog(job_plan.spec.checkpoint.path, "job", print).parts(follow=True)

    def next_text() -> str:
        return next(part for part in parts if part).decode()

    assert next_text() == "one\n"
    process.log("two")
    assert next_text() == "two\n"
    write_journal(path, begun(job_plan), RunEnded("succeeded"))
    process.log("the last words come after the journal's end")
    assert next_text().startswith("the last words")
    assert b"".join(parts) == b""


class Recording:
    """A job's recorder, and what it was slowed by."""

    def __init__(self, job_plan: JobPlan, fence: Callable[[], None] = lambda: None) -> None:
        self.now_s = 1000.0
        self.events = EventBus(unix=lambda: self.now_s)
        self.warnings: list[str] = []
        self.writer = BackgroundWriter(self.warnings.append)
        self.recorder = JobRecorder(
            job_plan,
            EventBuffer(),
            self.writer,
            self.events,
            fence=fence,
            warn=self.warnings.append,
        )
        self.recorder.begin(adopted=False)

    def train(self, steps: int, step_s: float = 1.0) -> float:
        """Steps, each with a line of output and a checkpoint that fails. Returns the time that the
        slowest one took, but for a few."""
        durations_s = []
        for step in range(1, steps + 1):
            self.now_s += step_s
            began_s = time.perf_counter()
            self.events.emit(StepRecord(step, 2, 1, 0.5, 0.0, 0.1, {}))
            self.events.emit(LogLine(0, "stdout", f"after step {step}"))
            self.events.emit(CheckpointFailed(step, 1, "the store is away", 1.0))
            durations_s.append(time.perf_counter() - began_s)
        return sorted(durations_s)[-1 - steps // 100]

    def close(self) -> bool:
        self.recorder.end(JobResult("job", {"steps": 7}, Path()))
        closed = self.writer.close(60)
        self.recorder.close_store(60)
        return closed


def test_hour_without_store_is_bounded_and_loses_no_event(
    job_plan: JobPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    come_back = away(monkeypatch)
    recording = Recording(job_plan)
    slowest_s = recording.train(3600)
    waiting = [len(queue.items) for queue in recording.recorder.store_writer._queues]
    deadline_s = time.monotonic() + 30
    while not any("timed out" in text for text in recording.warnings):
        assert time.monotonic() < deadline_s, "the outage has not fired"
        time.sleep(0.01)
    come_back()
    assert recording.close()
    assert slowest_s < 0.1
    assert max(waiting) <= 2
    assert not any("dropped" in text for text in recording.warnings)
    text, _ = read_stored(job_plan)
    assert text == job_plan.log_path.read_text()
    printed = [line for line in text.splitlines() if line.startswith("[rank 0] ")]
    assert printed == [f"[rank 0] after step {step}" for step in range(1, 3601)]
    events = (tmp_path / "store/job/events.jsonl").read_text()
    assert events.count('"kind": "checkpointfailed"') == 3600
    assert (tmp_path / "store/job/summary.json").read_bytes() == b'{\n  "steps": 7\n}\n'
    history = read_journal(job_plan.job_folder)
    assert (history.end_state, history.step) == ("succeeded", 3600)


def test_store_that_hangs_does_not_delay_the_journal(
    job_plan: JobPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request for the log hangs; the events are durable all the same."""
    hanging, release, write = threading.Event(), threading.Event(), LogUpload.write

    def hang(self: LogUpload, items: Any) -> None:
        hanging.set()
        release.wait(60)
        write(self, items)

    monkeypatch.setattr(LogUpload, "write", hang)
    recording = Recording(job_plan)
    recording.recorder.store_writer._queues[0].interval_s = 0.0
    recording.train(10)
    assert hanging.wait(10)
    assert recording.recorder.flush_journal(30)
    assert read_journal(job_plan.job_folder).step == 10
    release.set()
    assert recording.close()
    assert read_stored(job_plan)[0] == job_plan.log_path.read_text()


def test_nothing_is_copied_without_the_lease(job_plan: JobPlan, tmp_path: Path) -> None:
    held = threading.Event()
    held.set()

    def fence() -> None:
        if not held.is_set():
            raise LeaseLostError("another process has it")

    recording = Recording(job_plan, fence)
    recording.train(10)
    assert recording.writer._queues[0].flush(30)
    held.clear()
    recording.recorder.stop_journal()
    began_s = time.monotonic()
    recording.close()
    assert time.monotonic() - began_s < 30, "not waited for"
    assert not (tmp_path / "store/job/summary.json").exists()


def test_store_that_hangs_is_not_waited_for_without_the_lease(job_plan: JobPlan) -> None:
    lost, hangs, released = threading.Event(), threading.Event(), threading.Event()

    def fence() -> None:
        if lost.is_set():
            hangs.set()
            released.wait(120)
            raise LeaseLostError("another process has it")

    recording = Recording(job_plan, fence)
    store_log = recording.recorder.store_writer._queues[0]
    lost.set()
    store_log.put(None)
    store_log.flush(0.0)
    assert hangs.wait(60)
    recording.recorder.stop_journal()
    began_s = time.monotonic()
    recording.recorder.close_store(40)
    assert time.monotonic() - began_s < 30
    released.set()
    recording.writer.close(60)

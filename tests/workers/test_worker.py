"""A worker in this process, with a real process group of one rank, and without Ray."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rayzero.engine.errors import EngineError
from rayzero.workers import process_group
from rayzero.workers.group_sockets import SocketTracker
from rayzero.workers.messages import (
    Crashed,
    Finished,
    Heartbeat,
    Joined,
    LogLine,
    StepReport,
    Stopped,
    WorkerInfo,
)
from rayzero.workers.worker_status import FunctionBegin
from tests.workers.support import MakeWorker, begin, poll_until, run_until

INFO = WorkerInfo(0, "node", "node", "127.0.0.1", 1)


def test_generation_joins_and_finishes(make_worker: MakeWorker):
    worker, messages = run_until(make_worker, "returns", Finished)
    joined = messages.index(Joined(1, 0))
    first, report, second, finished = (
        message for message in messages if not isinstance(message, Heartbeat | Joined)
    )
    assert joined < messages.index(report), "who reports a step has joined"
    assert first == LogLine(0, "stdout", "line one")
    assert isinstance(report, StepReport)
    assert (report.step, report.counters, report.gauges["loss"]) == (1, {"tokens": 3}, 2.0)
    assert second == LogLine(0, "stdout", "line two")
    assert isinstance(finished, Finished)
    assert finished.result == {"world": 1, "score": 0.5}
    assert finished.counters == {"tokens": 4}
    assert finished.peak_rss_bytes > 50e6
    assert isinstance(messages[-1], Heartbeat)
    assert os.environ["RANK"] == "0"
    assert os.environ["WORLD_SIZE"] == "1"
    status = worker.status(INFO, "group")
    assert (status.messages, status.step) == ((Joined(1, 0), finished), 1)
    assert status.begin == FunctionBegin(0, 1, 1)


def test_process_that_the_function_forks_ends_with_it(make_worker: MakeWorker):
    worker = make_worker("forks")
    begin(worker)
    finished = poll_until(worker.poll, Finished)[-2:]
    assert [it.result for it in finished if isinstance(it, Finished)] == [{"codes": [0, 1]}]


@pytest.mark.parametrize(("given", "threads"), [("3", 3), (None, 2)])
def test_compute_threads_are_those_that_ray_was_told(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, given: str | None, threads: int
):
    """More than the reserved CPUs, if the optimizer runs on what the node has to spare."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    make_worker("returns", cpus=2.5)
    assert torch.get_num_threads() == threads


def test_process_that_was_stopped_calls_no_other_function(make_worker: MakeWorker):
    worker, _ = run_until(make_worker, "endless", StepReport)
    worker.stop(1)
    messages = poll_until(worker.poll, Stopped)
    assert Stopped(1, 0) in messages
    assert not [it for it in messages if isinstance(it, LogLine)], "the function is not told"
    assert dist.group.WORLD is not None
    assert list(c10d._world.pg_names) == [dist.group.WORLD], "the generation's group was aborted"
    with pytest.raises(EngineError, match="has been called in this process"):
        begin(worker, generation=2)


def test_late_command_for_another_generation_does_nothing(make_worker: MakeWorker):
    worker = make_worker("endless")
    begin(worker, generation=2)
    for command in (worker.stop, worker.end, worker.fence, worker.drain):
        command(1)
    poll_until(worker.poll, StepReport)
    poll_until(worker.poll, StepReport)


def test_stop_of_the_job_runs_what_the_function_does_at_its_end(make_worker: MakeWorker):
    worker, _ = run_until(make_worker, "cleans_up", StepReport)
    worker.end(1)
    worker.stop(1)
    messages = poll_until(worker.poll, Stopped)
    assert LogLine(0, "stdout", "cleaned up") in messages


def test_next_generation_waits_for_an_abort_in_flight(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
):
    """It would meet the new generation's process group."""
    worker, _ = run_until(make_worker, "returns", Finished)
    aborting, release = Event(), Event()

    def abort(device: torch.device, sockets: SocketTracker) -> None:
        aborting.set()
        assert release.wait(20)

    monkeypatch.setattr(process_group, "interrupt_collectives", abort)
    worker.fence(1)
    assert aborting.wait(20)

    def assign() -> None:
        with suppress(EngineError):  # the process is used up
            begin(worker, 2)

    assigning = Thread(target=assign)
    assigning.start()
    assigning.join(0.1)
    assert assigning.is_alive()
    release.set()
    assigning.join(20)
    assert worker._channel.generation == 2


def test_crash_follows_all_printed_lines(make_worker: MakeWorker):
    _, messages = run_until(make_worker, "raises", Crashed)
    line, crash = [m for m in messages if isinstance(m, LogLine | Crashed)]
    assert line == LogLine(0, "stdout", "half a line")
    assert isinstance(crash, Crashed)
    assert (crash.kind, crash.step) == ("user", 2)
    assert "workers/worker.py" not in crash.traceback
    assert 'raise ValueError("boom")' in crash.traceback


def test_fault_before_the_group_is_joined_fires(make_worker: MakeWorker):
    faults = ('raise_error(rank=0, step=1, phase="join")',)
    _, messages = run_until(make_worker, "returns", Crashed, faults=faults)
    assert not [it for it in messages if isinstance(it, Joined | StepReport)]


def test_invalid_entry_point_is_a_crash(make_worker: MakeWorker):
    _, messages = run_until(make_worker, "return", Crashed)
    (crash,) = [m for m in messages if isinstance(m, Crashed)]
    assert (crash.kind, crash.step, crash.traceback) == ("entrypoint", 0, "")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("returns_a_list", "it is a list, not a dict"),
        ("returns_non_json", "object is not a number"),
        ("returns_a_vector", "2 elements"),
        ("returns_deep", "recursion"),
        ("returns_much", r"it has \d{7} bytes; allowed: 1048576; .*ctx.output_dir"),
    ],
)
def test_non_json_result_is_omitted_and_reported(
    make_worker: MakeWorker, function: str, problem: str
):
    _, messages = run_until(make_worker, function, Finished)
    (line,) = [m for m in messages if isinstance(m, LogLine)]
    (finished,) = [m for m in messages if isinstance(m, Finished)]
    assert line.stream == "stderr"
    assert re.search(problem, line.text)
    assert finished.result is None


def test_working_directory_is_entered_or_reported_missing(make_worker: MakeWorker, tmp_path: Path):
    start_folder = os.getcwd()
    make_worker("returns", working_dir=str(tmp_path), import_paths=("/other",))
    assert Path.cwd() == tmp_path
    assert (sys.path[0], sys.path[-1]) == (str(tmp_path), "/other")
    os.chdir(start_folder)
    worker = make_worker("returns", working_dir="/no/such/folder")
    (line, _) = worker.poll(0)
    assert isinstance(line, LogLine)
    assert "working directory /no/such/folder does not exist on this node" in line.text


def test_missing_gpu_is_config_error(make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    _, messages = run_until(make_worker, "returns", Crashed, gpus=1)
    (crash,) = [m for m in messages if isinstance(m, Crashed)]
    assert crash.kind == "config"
    assert "workers.gpus" in crash.error


def test_stacks_show_the_users_code(make_worker: MakeWorker):
    def users_function() -> None:
        done.wait()

    done = Event()
    own = Thread(target=users_function, name="my-loader")
    idle = Thread(target=done.wait, name="some-library")
    for thread in (own, idle):
        thread.start()
    worker, _ = run_until(make_worker, "endless", StepReport)
    try:
        stacks = worker.dump_stack().text
    finally:
        done.set()
        own.join()
        idle.join()
    first, *others = stacks.split("thread ")[1:]
    assert first.startswith("rayzero-train\n  File ")
    assert "in endless" in first.splitlines()[1], "it begins with the user's function"
    assert any("my-loader\n" in text and "in users_function" in text for text in others)
    assert "some-library" in stacks.splitlines()[-1]

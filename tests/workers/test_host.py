"""A whole worker in this process, with a real process group of one, and no Ray."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayzero.workers import process_group
from rayzero.workers import retained_state as keeper_module
from rayzero.workers.messages import (
    Crashed,
    Finished,
    Heartbeat,
    Joined,
    LogLine,
    StepReport,
    Stopped,
)
from rayzero.workers.process_group import SocketTracker
from rayzero.workers.retained_state import RetainedState
from rayzero.workers.worker import WorkerProcess
from tests.workers.support import ASSIGN, poll_until, setup

MakeHost = Callable[..., WorkerProcess]


@pytest.fixture
def make_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeHost]:
    """Makes hosts and undoes what they do to the process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(os.getcwd())
    environment, threads = dict(os.environ), torch.get_num_threads()
    hosts: list[WorkerProcess] = []

    def make(entrypoint: str, **changes: Any) -> WorkerProcess:
        changes = {"working_dir": os.getcwd(), "import_paths": (os.getcwd(),)} | changes
        host = WorkerProcess(
            setup(entrypoint=f"tests.workers.functions:{entrypoint}", **changes), 0
        )
        hosts.append(host)
        return host

    yield make
    for host in reversed(hosts):
        host.close()
    process_group.abort_default_group(SocketTracker())
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)


def begin(host: WorkerProcess, generation: int = 1) -> None:
    host.assign(replace(ASSIGN, generation=generation, store_port=host.open_store()))


def test_a_generation_from_joining_to_the_result(make_host: MakeHost):
    host = make_host("returns")
    begin(host)
    seen = poll_until(host.poll, Finished)
    kept = [message for message in seen if not isinstance(message, Heartbeat)]
    joined, first, report, second, finished = kept
    assert joined == Joined(1, 0)
    assert first == LogLine(0, "stdout", "line one")
    assert isinstance(report, StepReport)
    assert (report.step, report.counters, report.gauges["loss"]) == (1, {"tokens": 3}, 2.0)
    assert second == LogLine(0, "stdout", "line two")
    assert isinstance(finished, Finished)
    assert finished.result == {"world": 1, "score": 0.5}
    assert finished.counters == {"tokens": 4}
    assert finished.peak_rss_bytes > 50e6
    assert isinstance(seen[-1], Heartbeat)
    assert os.environ["RANK"] == "0"
    assert os.environ["WORLD_SIZE"] == "1"


def test_the_function_is_called_again_in_the_next_generation(make_host: MakeHost):
    host = make_host("endless")
    begin(host)
    poll_until(host.poll, StepReport)
    host.stop(1)
    assert Stopped(1, 0) in poll_until(host.poll, Stopped)
    assert not dist.is_initialized()
    begin(host, generation=2)
    seen = poll_until(host.poll, StepReport)
    assert Joined(2, 0) in seen
    host.stop(1)  # late: meant for the one before
    poll_until(host.poll, StepReport)
    host.stop(2)
    assert Stopped(2, 0) in poll_until(host.poll, Stopped)


def test_a_careless_except_does_not_swallow_the_interrupt(make_host: MakeHost):
    host = make_host("endless")
    begin(host)
    poll_until(host.poll, StepReport)
    host.stop(1)
    seen = poll_until(host.poll, Stopped)
    assert LogLine(0, "stdout", "caught") not in seen


def test_a_crash_comes_after_everything_that_was_printed(make_host: MakeHost):
    host = make_host("raises")
    begin(host)
    seen = poll_until(host.poll, Crashed)
    line, crash = [m for m in seen if isinstance(m, LogLine | Crashed)]
    assert line == LogLine(0, "stdout", "half a line")
    assert isinstance(crash, Crashed)
    assert (crash.kind, crash.step) == ("user", 2)
    assert "workers/worker.py" not in crash.traceback
    assert 'raise ValueError("boom")' in crash.traceback


def test_a_wrong_entry_point_is_a_crash_before_the_first_step(make_host: MakeHost):
    host = make_host("return")
    begin(host)
    (crash,) = [m for m in poll_until(host.poll, Crashed) if isinstance(m, Crashed)]
    assert (crash.kind, crash.step, crash.traceback) == ("entrypoint", 0, "")


@pytest.mark.parametrize("function", ["returns_a_list", "returns_no_json"])
def test_a_result_the_summary_cannot_hold_is_left_out_and_told(make_host: MakeHost, function: str):
    host = make_host(function)
    begin(host)
    seen = poll_until(host.poll, Finished)
    (told,) = [m for m in seen if isinstance(m, LogLine)]
    (finished,) = [m for m in seen if isinstance(m, Finished)]
    assert told.stream == "stderr"
    assert finished.result is None


def test_the_submitters_folder_is_entered_or_its_absence_is_told(
    make_host: MakeHost, tmp_path: Path
):
    here = os.getcwd()
    make_host("returns", working_dir=str(tmp_path), import_paths=(str(tmp_path), "/other"))
    assert Path.cwd() == tmp_path
    assert (sys.path[0], sys.path[-1]) == (str(tmp_path), "/other")
    os.chdir(here)
    host = make_host("returns", working_dir="/no/such/folder")
    (told, _) = host.poll(0)
    assert isinstance(told, LogLine)
    assert "working directory /no/such/folder does not exist on this node" in told.text


def test_a_gpu_that_is_not_there_is_a_config_error(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    host = make_host("returns", gpus=1)
    begin(host)
    (crash,) = [m for m in poll_until(host.poll, Crashed) if isinstance(m, Crashed)]
    assert crash.kind == "config"
    assert "workers.gpus" in crash.error


def test_the_stacks_show_the_training_thread(make_host: MakeHost):
    host = make_host("endless")
    begin(host)
    poll_until(host.poll, StepReport)
    stacks = host.dump_stack()
    assert "thread rayzero-train" in stacks
    assert "in endless" in stacks


class LastEngine:
    """In a cycle, as engines are."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.itself = self

    def close(self) -> None: ...


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(("device", "room"), [("cuda", True), ("cpu", False)])
def test_the_last_engine_is_gone_before_the_next_one_is_made(
    device: str, room: bool, monkeypatch: pytest.MonkeyPatch
):
    """Two of them may not fit."""
    monkeypatch.setattr(keeper_module, "fits_twice", lambda processes: room)
    keeper = RetainedState(0)
    seen = keep_one(keeper, device)
    keeper.begin_generation(ASSIGN)
    assert seen() is None


@pytest.mark.usefixtures("uncollected")
def test_where_two_fit_the_last_engine_goes_when_a_step_is_done(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keeper_module, "fits_twice", lambda processes: True)
    keeper = RetainedState(0)
    first = keep_one(keeper, "cpu")
    keeper.begin_generation(ASSIGN)
    assert first() is not None  # nobody waits for it
    second = keep_one(keeper, "cpu")
    keeper.begin_generation(ASSIGN)
    assert first() is second() is None  # no step was done: three might not fit
    third = keep_one(keeper, "cpu")
    keeper.begin_generation(ASSIGN)
    assert third() is not None
    keeper.collect_garbage()
    assert third() is None


def keep_one(keeper: RetainedState, device: str) -> weakref.ref[LastEngine]:
    engine = LastEngine(device)
    keeper.retain(engine)  # type: ignore[arg-type]
    return weakref.ref(engine)

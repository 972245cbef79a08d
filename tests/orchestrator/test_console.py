from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import rich.console

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator import console as console_module
from rayzero.orchestrator.console import (
    Console,
    JsonConsole,
    LiveConsole,
    PlainConsole,
    console_for,
)
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.event_text import event_lines, format_step, summary_lines
from rayzero.orchestrator.job_events import (
    Checkpointed,
    CheckpointFailed,
    FaultDetected,
    JobWarning,
    Repaired,
    Resized,
    ResourcesAwaited,
    Resumed,
    StateEntered,
    WorkersReady,
)
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.results import JobResult
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.messages import LogLine, WorkerInfo

RESULT = JobResult("job", {"steps": 7, "loss": {"first": 8.0, "last": 2.5}}, Path("s.json"))
SHOWN_EVENTS = (
    WorkersReady((WorkerInfo(0, "id", "host", "10.0.0.1", 7),)),
    StateEntered(State.RUNNING, 1, 2),
    JobWarning("beware"),
    LogLine(1, "stdout", "[bold]not markup[/bold]"),
)


SECONDS = {"detect": 0.09, "fence": 0.01, "recompute": 0.14}
EVENTS = {
    "resumed": (Resumed(40, "runs/job/step-40"), "resuming after step 40, from runs/job/step-40"),
    "fault": (
        FaultDetected("lost", WorkerInfo(1, "id", "host", "10.0.0.1", 7), 1, 8, "rank 1 was lost"),
        "fault: rank 1 was lost",
    ),
    "injected": (
        FaultFired(1, 7, "kill(rank=1, step=7)"),
        "injected fault: kill(rank=1, step=7) on rank 1 in step 7",
    ),
    "repaired": (
        Repaired("lost", ("rank 1",), 41, 0, 3, 2, SECONDS),
        "repaired in 0.24 s: 3 -> 2 workers after step 41, no step recomputed "
        "(detect 0.09, fence 0.01, recompute 0.14)",
    ),
    "waiting": (
        ResourcesAwaited("2 CPUs: held by job a (2 CPUs)", 300.0),
        "waiting for up to 300 s (workers.start_timeout_s) for 2 CPUs: held by job a (2 CPUs)",
    ),
    "resized": (
        Resized("a node is draining", 41, 3, 2, {"drain": 0.5}),
        "resized in 0.50 s (a node is draining): 3 -> 2 workers after step 41 (drain 0.50)",
    ),
    "checkpoint": (
        Checkpointed(50, "f", 3 * 2**20, 0.5, 0.004),
        "checkpoint of step 50: 3 MiB in 0.50 s, training stopped for 4 ms",
    ),
    "checkpoint_failed": (
        CheckpointFailed(50, "the disk is full", 2, 4.0),
        "warning: checkpoint of step 50 failed (try 2, next in 4 s): the disk is full",
    ),
}


@pytest.mark.parametrize("event", list(EVENTS))
def test_event_is_one_line_and_one_json_object(event: str):
    shown_event, line = EVENTS[event]
    assert list(event_lines(shown_event)) == [line]
    lines: list[str] = []
    JsonConsole(lines.append).on_event(shown_event)
    (document,) = [json.loads(line) for line in lines]
    assert document["event"] == event
    assert set(document) >= set(vars(shown_event))


def record(step: int) -> StepRecord:
    return StepRecord(step, 2, 1, loss=1.5, tokens=1000, step_s=0.25, gauges={})


def test_format_of_step():
    assert format_step(record(3)) == "loss 1.5000 | 4,000 tokens/s | 0.250 s/step | 2 workers"
    bare = StepRecord(1, 1, 1, loss=None, tokens=0, step_s=0.5, gauges={})
    assert format_step(bare) == "0.500 s/step | 1 worker"


def test_plain_console_shows_steps_at_interval_and_last(monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    now_s = 0.0
    monkeypatch.setattr(console_module, "monotonic", lambda: now_s)
    console = PlainConsole(lines.append)
    console.start("job", 100)
    for step in range(1, 8):
        console.on_event(record(step))
        now_s += 1
    console.on_event(StateEntered(State.SUCCEEDED, 1, 2))
    shown = [line.split(" | ")[0] for line in lines]
    assert shown == ["job job", "step 1/100", "step 6/100", "step 7/100"]


def test_plain_console_shows_events_immediately():
    lines: list[str] = []
    console = PlainConsole(lines.append)
    console.await_next("starting Ray on this machine")
    for shown_event in SHOWN_EVENTS:
        console.on_event(shown_event)
    console.finish_ok(RESULT)
    assert lines == [
        "starting Ray on this machine",
        "worker 0 is ready on node host (pid 7)",
        "state: running",
        "warning: beware",
        "[rank 1] [bold]not markup[/bold]",
        "succeeded: 7 steps, loss 8 to 2.5",
        "summary: s.json",
    ]


def test_summary_says_how_it_went_and_what_to_do_next():
    metrics = {
        "job": "job",
        "steps": 1200,
        "seconds": 75.2,
        "stage": 2,
        "world_size": 1,
        "world_sizes": [2, 1],
        "faults": {"process": 1},
        "repairs": 1,
        "steps_redone": 0,
        "tokens_per_s": 8192.4,
        "loss": {"first": 8.25, "last": 2.5},
        "peak_bytes": {"slots": 0, "grad_slots": 2**20, "process": 662740992},
        "checkpoints": {"written": 1, "failed": 0},
        "newest_checkpoint": "runs/job/step-1200",
    }
    returned = {
        "file_bytes": "unknown",
        "accuracy": {"first": 0.0, "last": 0.12345678, "best": None},
        "sizes": [1, 2.5],
        "nothing": None,
    }
    result = JobResult("job", metrics | returned, Path("s.json"), returned)
    assert list(summary_lines(result)) == [
        "succeeded: 1,200 steps in 1 min 15 s, 2 then 1 workers, loss 8.25 to 2.5, 8,192 tokens/s",
        "faults: process 1; 1 repair, no step redone",
        "memory of the largest rank: gradient buffers 1 MiB, process 632 MiB",
        "checkpoint: runs/job/step-1200",
        "  to export it: rayzero ckpt export runs/job/step-1200 --to FOLDER",
        "  to train on from it: the same job with more steps",
        "file_bytes: unknown",
        "accuracy: first 0, last 0.123457",
        "sizes: 1, 2.5",
        "summary: s.json",
    ]


def test_returned_values_of_any_form_are_shown():
    """The training function's values take the place of the job's in `summary.json`."""
    returned = {"seconds": "soon", "loss": 2.5, "tokens_per_s": None, "faults": [1]}
    result = JobResult("job", {"steps": 1, **returned}, Path("s.json"), returned)
    assert list(summary_lines(result)) == [
        "succeeded: 1 step",
        "seconds: soon",
        "loss: 2.5",
        "faults: 1",
        "summary: s.json",
    ]


def test_json_lines_are_json_and_end_with_summary():
    lines: list[str] = []
    console = JsonConsole(lines.append)
    console.start("job", None)
    for shown_event in (*SHOWN_EVENTS, record(1)):
        console.on_event(shown_event)
    console.finish_ok(RESULT)
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == (
        "job workers state warning log step summary"
    ).split()
    assert events[2]["state"] == "running"
    assert (events[5]["step"], events[5]["tokens_per_s"]) == (1, 4000)
    assert events[-1]["loss"] == {"first": 8.0, "last": 2.5}


def test_fault_that_ends_the_job_is_shown_by_its_error_only():
    """A log has no other line about it."""
    worker = WorkerInfo(0, "id", "host", "10.0.0.1", 7)
    fault = FaultDetected("user", worker, 0, 3, "rank 0 raised an exception", is_fatal=True)
    for shows_end in (True, False):
        lines: list[str] = []
        PlainConsole(lines.append, shows_end=shows_end).on_event(fault)
        assert lines == ([] if shows_end else ["fault: rank 0 raised an exception"])


@pytest.mark.parametrize("kind", [PlainConsole, JsonConsole])
def test_errors_go_to_stderr(
    kind: type[PlainConsole] | type[JsonConsole], capsys: pytest.CaptureFixture[str]
):
    lines: list[str] = []
    kind(lines.append).finish_error(ConfigError("wrong", allowed="right", fix="key"))
    assert capsys.readouterr().err == "error: wrong\n  allowed: right\n  fix: key\n"
    kind(lines.append).finish_error(JobStoppedError("stopped"))
    assert capsys.readouterr().err == "stopped\n", "it was asked for: no error"


def test_bar_prints_lines_above_itself_and_shows_step():
    out = io.StringIO()
    bar = LiveConsole(rich.console.Console(file=out, force_terminal=True, width=140))
    awaited = []
    bar.start("job", 10)
    for shown_event in (StateEntered(State.STARTING, 0, 0), *SHOWN_EVENTS, record(4)):
        bar.on_event(shown_event)
        bar.await_next("starting Ray")  # of another thread, too late
        awaited.append(bar.awaited)
    bar.finish_ok(RESULT)
    shown = out.getvalue()
    assert awaited[:3] == ["workers start", "workers form a group", "first step"]
    assert "[rank 1] [bold]not markup[/bold]" in shown
    assert "job: running" in shown
    assert "4/10" in shown
    assert "loss 1.5000" in shown


def test_only_console_writes_to_stdout(capsys: pytest.CaptureFixture[str]):
    before = sys.stdout
    with console_for(as_json=True) as console:
        made: Console = console
        made.start("job", 1)
        print("somebody else")
    assert sys.stdout is before
    out, err = capsys.readouterr()
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["job"]
    assert "somebody else" in err

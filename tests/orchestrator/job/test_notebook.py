"""Ctrl-C, and what a person sees who works in Python: representations, errors. No cluster."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rayzero
from rayzero.engine.errors import ConfigError, DataError
from rayzero.orchestrator.errors import JobInterrupted, JobStoppedError
from rayzero.orchestrator.job import api
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.job_events import JobEvent, JobWarning
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.results import EndedJob, JobResult, JobStatus


def train(ctx: object) -> None: ...


def refuse_name() -> None:
    rayzero.Job("a b", train)  # here


class FakeHandle:
    """A job that runs until `stop`, and after it for as long as `stubborn`. Each wait is a chance
    to press Ctrl-C."""

    on_hard_exit = "kills it"

    def __init__(self, press: Callable[[], None], *, stubborn: bool) -> None:
        self.calls: list[str] = []
        self._press, self._stubborn = press, stubborn

    def wait(self, timeout_s: float | None = None) -> bool:
        ended = "stop" in self.calls and not self._stubborn
        if not ended:
            self._press()
        return ended

    def result(self) -> JobResult:
        raise JobStoppedError("job 'j' was stopped after step 3")

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append(name)


class Warnings:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_event(self, event: JobEvent) -> None:
        assert isinstance(event, JobWarning)
        self.texts.append(event.text)


@pytest.fixture
def interactive() -> Iterator[None]:
    """SIGINT as Python, IPython and notebooks have it while a cell runs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler, "not put back"


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.usefixtures("interactive")
def test_first_ctrl_c_requests_a_stop_and_the_second_ends_the_wait(
    stubborn: bool, monkeypatch: pytest.MonkeyPatch
):
    handle, shown = FakeHandle(press, stubborn=stubborn), Warnings()
    monkeypatch.setattr(api.Job, "submit", lambda *_: handle)
    with pytest.raises(KeyboardInterrupt) as raised:
        api.Job("j", train).run(observer=shown)
    assert shown.texts == ["SIGINT: stopping the job; once more kills it"]
    assert handle.calls == (["stop", "abandon", "close"] if stubborn else ["stop"])
    assert isinstance(raised.value, JobInterrupted)
    message, place = raised.value._render_traceback_()
    assert ("a second Ctrl-C kills it" if stubborn else "was stopped after step 3") in message
    assert "api.Job" in place


@pytest.mark.usefixtures("interactive")
def test_ctrl_c_while_the_cluster_starts_is_an_interrupt(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api.Job, "submit", lambda *_: press())
    with pytest.raises(KeyboardInterrupt):
        api.Job("j", train).run(observer=Warnings())


def test_a_handler_of_the_callers_own_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        handle = FakeHandle(lambda: (press(), handle.stop()), stubborn=False)  # type: ignore[func-returns-value]
        monkeypatch.setattr(api.Job, "submit", lambda *_: handle)
        with pytest.raises(JobStoppedError):
            api.Job("j", train).run(observer=Warnings())
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_representations_are_one_line():
    job = api.Job("gpt", "gpt:train", workers={"min": 1, "max": 4}, steps=80)
    assert repr(job) == "<Job 'gpt': gpt:train, workers 1:4, 80 steps>"
    status = JobStatus("gpt", State.RUNNING, step=12, steps=80, world_size=2, loss=0.5)
    assert repr(status) == "<JobStatus 'gpt': running at step 12 of 80, 2 workers, loss 0.5>"
    result = JobResult("gpt", {"steps": 80, "loss": {"last": 0.25}}, Path("s.json"))
    assert repr(result) == "<JobResult 'gpt': 80 steps, loss 0.25, s.json>"
    ended = JobStatus("gpt", State.FAILED, step=3, error="no memory")
    handle = JobHandle.of_ended(EndedJob(ended, result))
    assert repr(handle) == "<JobHandle 'gpt': failed at step 3: no memory>"


def test_error_shows_its_message_and_the_users_line_only():
    with pytest.raises(ConfigError) as raised:
        refuse_name()
    shown = raised.value._render_traceback_()
    assert shown[0].startswith("ConfigError: job: name: must be letters")
    assert shown[-1].endswith('of refuse_name: rayzero.Job("a b", train)  # here')
    assert len(shown) == 2
    assert len(raised.traceback) <= 4  # this test, the user's function, two of the public method


def test_cause_in_the_users_code_keeps_its_traceback():
    try:
        try:
            [].pop()
        except IndexError as error:
            raise DataError("sample 3 cannot be read") from error
    except DataError as error:
        shown = error._render_traceback_()
    assert shown[0] == "DataError: sample 3 cannot be read"
    assert "[].pop()" in "\n".join(shown)
    assert shown[-1] == "IndexError: pop from empty list"


def over_a_lock() -> Callable[[object], object]:
    state = {"lock": threading.Lock()}
    return lambda ctx: state


class Trainer:
    def __init__(self) -> None:
        self.output = open(sys.executable, "rb")  # noqa: SIM115  # closed by the test

    def train(self, ctx: object) -> None: ...


def test_function_that_cannot_be_pickled_names_the_variable():
    with pytest.raises(ConfigError, match=r"<lambda> uses state, which cannot be sent.*lock"):
        api._pickle(over_a_lock())
    trainer = Trainer()
    with trainer.output, pytest.raises(ConfigError, match=r"output.*cannot be sent to the workers"):
        api._pickle(lambda ctx: trainer.train(ctx))
    assert api._pickle(train)


# Modules with dataclasses are imported by `exec` of strings: Ray's among them.
_INTERRUPTED_IMPORT = """
import os, signal, sys
from rayzero.orchestrator.job.stop_signals import StopSignals

with StopSignals() as signals:
    try:
        exec("os.kill(os.getpid(), signal.SIGINT)")
    except KeyboardInterrupt:
        sys.exit(signals.exit_code)
"""


def test_interrupt_inside_exec_ends_process_with_the_commands_own_exit_code(tmp_path: Path):
    (tmp_path / "interrupted.py").write_text(_INTERRUPTED_IMPORT)
    done = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, timeout=60)
    assert done.returncode == 130

"""A client, and the head's hook, while the cluster's head is away. No cluster."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rayzero.orchestrator.cluster.connect import ClusterConnection
from rayzero.orchestrator.errors import JobFailedError, JobStoppedError
from rayzero.orchestrator.job import handle as handles
from rayzero.orchestrator.job import prestop
from rayzero.orchestrator.job.client import JobUnavailableError
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.job_events import JobWarning
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.results import EndedJob, EventPage, JobStatus
from rayzero.orchestrator.spec import JobSpec
from tests.orchestrator.support import EventLog

CALL_S = 20.0


class Process:
    """A job's process that answers once, not for so many calls of 20 s, and then from another
    process, to its end."""

    name = "j"

    def __init__(self, away_calls: int) -> None:
        self.now_s, self.stops = 0.0, 0
        self.asked_twice = threading.Event()
        self.may_answer = threading.Event()
        self._away_calls = away_calls
        self._calls = 0

    def monotonic(self) -> float:
        return self.now_s

    def request_stop(self) -> None:
        self.stops += 1

    def call(self, method: Any, *args: Any, **limits: Any) -> EventPage | None:
        if method.__name__ != "fetch_events":
            return None
        self._calls += 1
        if self._calls == 1:
            return EventPage("first")
        self.asked_twice.set()
        if self._calls <= 1 + self._away_calls:
            assert self.may_answer.wait(60)
            self.now_s += CALL_S
            raise JobUnavailableError("the process does not answer")
        if not self.stops:
            return EventPage("second")
        stopped = JobStoppedError("stopped")
        return EventPage("second", ended=EndedJob(JobStatus("j", State.STOPPED), stopped))


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Any:
    def begin(process: Process, log: EventLog) -> JobHandle:
        monkeypatch.setattr(handles, "time", process)
        monkeypatch.setattr(handles, "_RETRY_PAUSE_S", 0.0)
        spec = JobSpec(name="j", entrypoint="m:f", recovery={"orphan_s": 400})
        handle = JobHandle(process, ClusterConnection(False, True), log, 0, spec)  # type: ignore[arg-type]
        assert process.asked_twice.wait(60)
        return handle

    return begin


def test_client_waits_for_a_head_and_asks_its_process_again_to_stop(follow: Any):
    process, log = Process(away_calls=10), EventLog()
    handle = follow(process, log)
    handle.stop()
    process.may_answer.set()
    with pytest.raises(JobStoppedError):
        handle.result()
    assert process.stops == 2, "the first request was lost with the process"
    (warning,) = log.of(JobWarning)
    assert "waiting at most 400 s (recovery.orphan_s)" in warning.text


def test_client_gives_up_after_the_time_in_which_the_workers_end_themselves(follow: Any):
    process = Process(away_calls=1000)
    handle = follow(process, EventLog())
    process.may_answer.set()
    with pytest.raises(JobFailedError, match="does not answer, for 400 s") as failed:
        handle.result()
    assert 400 < process.now_s <= 400 + CALL_S
    assert "rayzero logs -f j" in failed.value.fix


@pytest.mark.parametrize(
    ("nodes", "draining", "leaves"),
    [
        ({"head"}, [set()], True),
        ({"head", "a", "b"}, [set(), {"a"}, {"a", "b"}], True),
        ({"head", "a", "b"}, [{"a"}] * 99, False),
        ({"head", "a"}, [{"head"}] * 99, False),
    ],
)
def test_jobs_are_stopped_only_if_all_other_nodes_leave(
    monkeypatch: pytest.MonkeyPatch, nodes: set[str], draining: list[set[str]], leaves: bool
) -> None:
    answers, now_s = iter(draining), 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(prestop, "node_capacities", lambda: dict.fromkeys(nodes))
    monkeypatch.setattr(prestop, "head_node_id", lambda: "head")
    monkeypatch.setattr(prestop, "draining_node_ids", lambda: next(answers))
    monkeypatch.setattr(prestop, "monotonic", lambda: now_s)
    monkeypatch.setattr(prestop, "sleep", sleep)
    assert prestop.all_nodes_leave(5.0) == leaves
    assert now_s <= 5.5

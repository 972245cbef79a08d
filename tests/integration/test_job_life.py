"""Detached jobs: they outlive their driver and survive a lost controller process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.errors import JobFailedError, JobStoppedError
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.job_events import (
    Checkpointed,
    JobWarning,
    Reattached,
    WorkersReady,
)
from rayzero.orchestrator.journal.files import read_journal
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import Workers
from rayzero.workers.chaos.inject import FaultRecord
from tests.integration.conftest import Head
from tests.integration.scraping import (
    METRICS,
    check_endpoint_is_closed,
    check_metrics,
    files_have_steps,
    has_recovered,
)
from tests.integration.steady_job import assert_names_sigkill, latest_step, steady_job, wait_for
from tests.orchestrator.support import EventLog
from tests.support.token_head import wait_for as wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_leaks")]
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 200


def stop(handle: JobHandle) -> None:
    handle.stop()
    assert handle.wait(60)
    with pytest.raises(JobStoppedError):
        handle.result()


DRIVER = """
import sys, time
from tests.integration.steady_job import steady_job
from pathlib import Path
handle = steady_job(Path(sys.argv[1])).submit(address=sys.argv[2])
for event in handle.events():
    if type(event).__name__ == "StepRecord" and event.step > 5:
        print("running", flush=True)
        time.sleep(600)
"""


def test_job_outlives_its_driver_and_can_be_attached_to(head: Head, tmp_path: Path):
    command = [sys.executable, "-c", DRIVER, str(tmp_path), head.address]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "running\n"
    driver.kill()
    driver.wait()
    event_log = EventLog()
    handle = Job.attach("steady", observer=event_log)
    wait_for(handle, lambda: len(event_log.of(StepRecord)) > 10)
    status = handle.status()
    assert (status.state, status.world_size, status.is_running) == (State.RUNNING, 2, True)
    # The same spec attaches to the run, other worker limits are applied, other changes rejected.
    same = steady_job(tmp_path).submit()
    assert same.status().began_at_s == pytest.approx(status.began_at_s, abs=1)
    scaled = steady_job(tmp_path, workers=Workers(min=1, max=2)).submit()
    assert (scaled.status().workers_min, scaled.status().workers_max) == (1, 2)
    with pytest.raises(ConfigError) as rejected:
        steady_job(tmp_path, seed=7, steps=5).submit()
    assert "    seed: 0 -> 7\n" in str(rejected.value)
    assert "    steps: 1000000 -> 5" in str(rejected.value)
    follower = Job.attach("steady")
    lines = follower.logs(follow=True, rank=1)
    assert next(lines) == "[rank 1] started"
    stop(handle)
    assert list(lines)[-1:] == ["[rank 1] finished"]
    assert follower.wait(30)
    # Handles attached after the end still get the result and the output.
    with pytest.raises(JobStoppedError, match="was stopped after step"):
        follower.result()
    late = Job.attach("steady")
    with pytest.raises(JobStoppedError, match="was stopped after step"):
        late.result()
    assert (late.wait(0), late.status().state) == (True, State.STOPPED)
    assert list(late.events()) == []
    late.stop()
    output = list(late.logs())
    assert output.count("[rank 0] started") == output.count("[rank 1] finished") == 1
    journal = read_journal(str(tmp_path / "steady"))
    assert journal is not None
    assert (journal.end_state, journal.scaled_limits) == ("stopped", (1, 2))
    with pytest.raises(ConfigError, match="no running job is called 'missing'"):
        Job.attach("missing")


def test_all_metrics_are_exposed_and_next_controller_has_the_workers_of_a_killed_one(
    head: Head, tmp_path: Path
):
    """A job loses a worker, replaces it, and then loses its controller process."""
    event_log = EventLog()
    handle = steady_job(tmp_path, metrics=METRICS).submit(observer=event_log)
    wait_for(handle, lambda: len(event_log.of(Checkpointed)) >= 2)
    generation = handle.status().generation
    handle.scale("1:2")
    handle.inject(f"kill(rank=1, step={latest_step(event_log) + 5})")
    wait_for(handle, lambda: sum(handle.status().faults.values()) == 1)
    wait_for(handle, lambda: has_recovered(event_log))
    check_metrics(event_log, "steady", steps=1_000_000)
    wait_for(handle, lambda: files_have_steps(tmp_path / "steady"))
    wait_for(handle, lambda: is_journaled(str(tmp_path / "steady"), generation))
    curves = tmp_path / "steady" / "history.json"
    wait_for(handle, lambda: curves.exists() and b'"loss"' in curves.read_bytes())
    (controller,) = head.processes("ray::JobActor")
    step_before = latest_step(event_log)
    pids = [worker.pid for event in event_log.of(WorkersReady) for worker in event.workers]
    controller.send_signal(signal.SIGKILL)
    wait_for(
        handle, lambda: bool(event_log.of(Reattached)) and latest_step(event_log) > step_before
    )
    (again,) = event_log.of(Reattached)
    assert again.generation > generation
    assert again.step >= step_before - 1, "no finished step is lost"
    status = handle.status()
    assert sum(status.faults.values()) == 1, "the fault budget is preserved"
    assert (status.workers_min, status.workers_max) == (1, 2)
    assert any(is_worker(pid) for pid in pids)
    stop(handle)
    handle.end()
    wait_until(lambda: not any(is_worker(pid) for pid in pids), TIMEOUT_S, "the workers' end")
    check_endpoint_is_closed(event_log)
    rows = json.loads(curves.read_bytes())["curves"]["loss"]
    assert rows[0][0] == 1, "the curves are those of both processes"
    assert rows[-1][0] > step_before


def is_journaled(folder: str, generation: int) -> bool:
    """Whether the journal, written asynchronously, has the fault, limits and generation."""
    journal = read_journal(folder)
    if journal is None or journal.generation <= generation:
        return False
    return len(journal.faults) == 1 and journal.scaled_limits == (1, 2)


def is_worker(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        title = " ".join(process.cmdline())
        return title.startswith("ray::WorkerActor") and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_one_job_fails_and_prestop_hook_of_head_stops_the_other(head: Head, tmp_path: Path):
    """Two jobs share a cluster. A killed worker fails the first within seconds; after the head
    pod's preStop hook, the second has a checkpoint of its last step."""
    event_logs = {name: EventLog() for name in ("first", "second")}
    handles = {
        name: steady_job(
            tmp_path,
            name,
            workers=Workers(min=workers),
            checkpoint={"path": str(tmp_path), "every_steps": 100_000},
            recovery={"max_faults": 0},
        ).submit(observer=event_logs[name])
        for name, workers in (("first", 2), ("second", 1))
    }
    for name, handle in handles.items():
        wait_for(handle, lambda name=name: latest_step(event_logs[name]) > 5)  # type: ignore[misc]
    _assert_killed_worker_fails_job(handles["first"], event_logs["first"], tmp_path)
    event_log = event_logs["second"]
    steps_so_far = latest_step(event_log)
    wait_for(handles["second"], lambda: latest_step(event_log) > steps_so_far + 20)
    events = handles["second"].events()
    assert next(event for event in events if isinstance(event, StepRecord)).step == 1
    _assert_prestop_hook_stops_job(head, handles["second"], event_log)
    assert not [event for event in event_log.of(JobWarning) if "vault" in event.text]
    log = (tmp_path / "second" / "logs" / "job.log").read_text()
    assert "state: running\n" in log
    lines = (tmp_path / "second" / "events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert (kinds[0], kinds[-1]) == ("begun", "ended")


def _assert_killed_worker_fails_job(handle: JobHandle, event_log: EventLog, tmp_path: Path) -> None:
    """SIGKILL a rank's worker; the other rank waits for it in a collective."""
    (ready,) = event_log.of(WorkersReady)
    handle.inject("kill(rank=1)")
    assert handle.wait(TIMEOUT_S)
    with pytest.raises(JobFailedError) as caught:
        handle.result()
    text = str(caught.value).splitlines()[0]
    victim = next(worker for worker in ready.workers if f"(pid {worker.pid})" in text)
    assert text.startswith(f"rank 1 on node {victim.node} (pid {victim.pid}) was lost after step")
    assert_names_sigkill(text)
    assert [fired.rank for fired in FaultRecord(tmp_path / handle.name).read()] == [1]


def _assert_prestop_hook_stops_job(head: Head, handle: JobHandle, event_log: EventLog) -> None:
    command = [sys.executable, "-m", "rayzero.orchestrator.job.prestop", str(TIMEOUT_S)]
    env = os.environ | {"RAY_ADDRESS": head.address}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=3 * TIMEOUT_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{handle.name}: stopped\n"), done.stderr
    assert handle.wait(TIMEOUT_S)
    with pytest.raises(JobStoppedError):
        handle.result()
    assert handle.status().state is State.STOPPED
    assert event_log.of(Checkpointed)[-1].step == latest_step(event_log)
    handle.end()

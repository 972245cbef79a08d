"""Jobs that outlive who submitted them, and what happens when their own process is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util import list_named_actors
from ray.util.placement_group import placement_group_table

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.job_events import (
    Checkpointed,
    JobWarning,
    Resumed,
    RunAdopted,
    WorkersReady,
)
from rayzero.orchestrator.journal.files import read_journal
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import Workers
from tests.integration.conftest import CPUS, Head
from tests.integration.jobs.steady import ENGINE
from tests.orchestrator.support import EventLog

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 200


@pytest.fixture(scope="module")
def connected(head: Head) -> Iterator[None]:
    ray.init(address=head.address, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def nothing_left(connected: None, head: Head) -> Iterator[None]:
    """After every test: no actor, no placement group, no reserved CPU, no process of a job."""
    yield
    until_s = time.monotonic() + 60
    while (left := remains(head)) and time.monotonic() < until_s:
        time.sleep(0.3)
    for one in list_named_actors(all_namespaces=True) if left else []:
        ray.kill(ray.get_actor(**one))  # the tests after it need the CPUs
    assert left == []


def remains(head: Head) -> list[str]:
    groups = [one for one in placement_group_table().values() if one["state"] != "REMOVED"]
    actors = list_named_actors(all_namespaces=True)
    cpus = ray.available_resources().get("CPU")
    ours = head.processes("ray::JobActor", "ray::WorkerActor", "ray::VaultActor")
    found = [f"group {one['name']}" for one in groups]
    found += [str(one) for one in actors if one["namespace"] == "rayzero"]
    found += [str(one) for one in ours]
    return [*found, f"{cpus} CPUs"] if found or cpus != CPUS else []


def steady(folder: Path, name: str = "steady", **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "engine": ENGINE,
        "workers": Workers(min=2),
        "steps": 1_000_000,
        "checkpoint": {"path": str(folder), "every_steps": 20},
    }
    return Job(name, "tests.integration.jobs.steady:train", **(settings | changes))


def until(handle: JobHandle, there: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not there():
        if handle.wait(0.05):
            handle.result()
        assert time.monotonic() < until_s


def ended(handle: JobHandle) -> None:
    handle.stop()
    assert handle.wait(60)
    with pytest.raises(JobStoppedError):
        handle.result()


def step(notes: EventLog) -> int:
    return max((record.step for record in notes.of(StepRecord)), default=0)


DRIVER = """
import sys, time
from tests.integration.test_job_life import steady
from pathlib import Path
handle = steady(Path(sys.argv[1])).submit(address=sys.argv[2])
for notice in handle.events():
    if type(notice).__name__ == "StepRecord" and notice.step > 5:
        print("running", flush=True)
        time.sleep(600)
"""


def test_a_job_outlives_its_driver_and_is_attached_to(head: Head, tmp_path: Path):
    command = [sys.executable, "-c", DRIVER, str(tmp_path), head.address]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "running\n"
    driver.kill()
    driver.wait()
    notes = EventLog()
    handle = Job.attach("steady", observer=notes)
    until(handle, lambda: len(notes.of(StepRecord)) > 10)
    status = handle.status()
    assert (status.state, status.world_size, status.is_running) == (State.RUNNING, 2, True)
    # The same spec follows the run that there is; other limits change it; all else is refused.
    again = steady(tmp_path).submit()
    assert again.status().began_at_s == pytest.approx(status.began_at_s, abs=1)
    more = steady(tmp_path, workers=Workers(min=1, max=2)).submit()
    assert (more.status().workers_min, more.status().workers_max) == (1, 2)
    with pytest.raises(ConfigError) as refused:
        steady(tmp_path, seed=7, steps=5).submit()
    assert "    seed: 0 -> 7\n" in str(refused.value)
    assert "    steps: 1000000 -> 5" in str(refused.value)
    follower = Job.attach("steady")
    live = follower.logs(follow=True, rank=1)
    assert next(live) == "[rank 1] begun"
    ended(handle)
    assert list(live)[-1:] == ["[rank 1] left"]
    assert follower.wait(30)
    # Those who were not there know the end, too, and what was printed.
    with pytest.raises(JobStoppedError, match="was stopped after step"):
        follower.result()
    later = Job.attach("steady")
    with pytest.raises(JobStoppedError, match="was stopped after step"):
        later.result()
    assert (later.wait(0), later.status().state) == (True, State.STOPPED)
    assert list(later.events()) == []
    later.stop()
    printed = list(later.logs())
    assert printed.count("[rank 0] begun") == printed.count("[rank 1] left") == 1
    past = read_journal(str(tmp_path / "steady"))
    assert past is not None
    assert (past.end_state, past.scaled_limits) == ("stopped", (1, 2))
    with pytest.raises(ConfigError, match="no running job is called 'nobody'"):
        Job.attach("nobody")


def test_a_killed_controller_is_restarted_and_adopts_its_run(head: Head, tmp_path: Path):
    notes = EventLog()
    handle = steady(tmp_path).submit(observer=notes)
    until(handle, lambda: len(notes.of(Checkpointed)) >= 2)
    generation = handle.status().generation
    handle.scale("1:2")
    handle.inject(f"kill(rank=1, step={step(notes) + 5})")
    until(handle, lambda: sum(handle.status().faults.values()) == 1)
    until(handle, lambda: is_written(str(tmp_path / "steady"), generation))
    (controller,) = head.processes("ray::JobActor")
    before = step(notes)
    pids = [worker.pid for up in notes.of(WorkersReady) for worker in up.workers]
    controller.send_signal(signal.SIGKILL)
    until(handle, lambda: bool(notes.of(RunAdopted)) and step(notes) > before)
    (adopted,) = notes.of(RunAdopted)
    assert adopted.generation > generation
    assert 0 < adopted.step <= before + 500, "the notes of its last steps may be lost"
    assert notes.of(Resumed)[-1].step % 20 == 0
    status = handle.status()
    assert status.generation > adopted.generation
    assert sum(status.faults.values()) == 1, "the budget goes on"
    assert (status.workers_min, status.workers_max) == (1, 2)
    until(handle, lambda: not any(is_worker(pid) for pid in pids))
    ended(handle)


def is_written(folder: str, generation: int) -> bool:
    """The journal is written behind; it has the fault, the new limits and a later generation."""
    past = read_journal(folder)
    if past is None or past.generation <= generation:
        return False
    return len(past.faults) == 1 and past.scaled_limits == (1, 2)


def is_worker(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        title = " ".join(process.cmdline())
        return title.startswith("ray::WorkerActor") and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_two_jobs_on_one_cluster_with_logs_journals_and_status(tmp_path: Path):
    notes = {name: EventLog() for name in ("first", "second")}
    handles = {
        name: steady(
            tmp_path, name, workers=Workers(min=1), checkpoint={"path": str(tmp_path)}
        ).submit(observer=seen)
        for name, seen in notes.items()
    }
    for name, handle in handles.items():
        until(handle, lambda name=name: step(notes[name]) > 5)  # type: ignore[misc]
    ended(handles["first"])
    reached = step(notes["second"])
    until(handles["second"], lambda: step(notes["second"]) > reached + 20)
    told = handles["second"].events()
    assert next(one for one in told if isinstance(one, StepRecord)).step == 1
    ended(handles["second"])
    assert handles["second"].status().state is State.STOPPED
    assert not [one for one in notes["second"].of(JobWarning) if "vault" in one.text]
    log = (tmp_path / "second" / "logs" / "job.log").read_text()
    assert "state: running\n" in log
    lines = (tmp_path / "second" / "events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert (kinds[0], kinds[-1]) == ("begun", "ended")


def test_the_stop_hook_of_a_head_stops_its_jobs_first(head: Head, tmp_path: Path):
    """What the head pod's preStop does: afterwards every job has a checkpoint of its last step."""
    notes = EventLog()
    checkpoint = {"path": str(tmp_path), "every_steps": 100_000}
    handle = steady(tmp_path, workers=Workers(min=1), checkpoint=checkpoint).submit(observer=notes)
    until(handle, lambda: step(notes) > 5)
    command = [sys.executable, "-m", "rayzero.orchestrator.job.prestop", str(LIMIT_S)]
    own = os.environ | {"RAY_ADDRESS": head.address}
    done = subprocess.run(
        command, env=own, capture_output=True, text=True, timeout=3 * LIMIT_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "steady: stopped\n"), done.stderr
    assert handle.wait(LIMIT_S)
    with pytest.raises(JobStoppedError):
        handle.result()
    assert notes.of(Checkpointed)[-1].step == step(notes)
    handle.end()

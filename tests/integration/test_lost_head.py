"""A cluster with a store for its head's state: training goes on while the head is away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import ray

from rayzero.engine.data.sample_ledger import read_ledger
from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cluster.connect import connect
from rayzero.orchestrator.job.api import Job, Role
from rayzero.orchestrator.job.client import JobProcess, JobUnavailableError
from rayzero.orchestrator.job.ended_jobs import load_ended
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.job_events import RoleWorkerReady
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import Workers
from rayzero.workers.lifetimes import find_owned, has_process
from tests.integration.steady_job import latest_step, steady_job, wait_for, world_size
from tests.orchestrator.support import EventLog
from tests.support.durable_head import DurableHead
from tests.support.token_head import ROOT
from tests.support.token_head import wait_for as wait_until

if TYPE_CHECKING:  # it imports torch, which no driver needs
    from rayzero.workers.roles.context import RoleContext

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
LIMIT_S = 200.0
STEPS_ALONE = 20
READY, STOP = "ready", "stop-now"
TITLES = "ray::WorkerActor", "ray::VaultActor", "ray::JobActor", "ray::RoleActor"


def test_training_outlives_the_head_and_nothing_outlives_the_job(tmp_path: Path):
    cluster = DurableHead(tmp_path, cpus=3)
    try:
        run_driver(cluster, "begin", tmp_path)
        (role_worker,) = cluster.processes("ray::RoleActor")
        ledger = tmp_path / "steady" / "ledger"
        kept, killed = workers = sorted(cluster.processes("ray::WorkerActor"))
        cluster.lose_head()
        step = max(read_ledger(ledger))
        wait_until(lambda: max(read_ledger(ledger)) > step + STEPS_ALONE, LIMIT_S, "training")
        assert not cluster.processes("ray::JobActor")
        cluster.start_head()
        run_driver(cluster, "go_on", tmp_path)
        assert sorted(cluster.processes("ray::WorkerActor")) == workers
        assert cluster.processes("ray::RoleActor") == {role_worker}
        (steps,) = steps_by_generation(ledger)
        assert steps == [*range(1, steps[-1] + 1)]
        cluster.lose_head()
        step = max(read_ledger(ledger))
        for pid in (killed, role_worker):
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not psutil.pid_exists(pid), LIMIT_S, "the end of a worker")
        cluster.start_head()
        run_driver(cluster, "go_on", tmp_path)
        wait_until(lambda: cluster.processes("ray::RoleActor"), LIMIT_S, "another judge")
        pids = cluster.processes("ray::WorkerActor")
        assert kept in pids - {killed}
        before, *_, after = steps_by_generation(ledger)
        assert before == [*range(1, before[-1] + 1)]
        # The killed worker's newest step may be in its ledger, and not yet reported.
        assert before[-1] >= step
        assert 0 <= before[-1] + 1 - after[0] <= 1
        assert run_driver(cluster, "lose_process", tmp_path) == {"left": []}
        entries = journal(tmp_path / "steady")
        assert [entry["kind"] for entry in entries].count("begun") == 3
        redone = [entry["steps_redone"] for entry in entries if entry["kind"] == "repaired"]
        assert redone == [0], "no finished step again"
        lost = [entry["lost_ranks"] for entry in entries if "lost_ranks" in entry]
        assert [len(ranks) for ranks in lost] == [0, 1]
        roles = [entry["roles"]["judge"] for entry in entries if "lost_ranks" in entry]
        assert roles == [1, 0]
        assert not cluster.processes(*TITLES)
        check_controller_outlives_head(cluster, tmp_path)
    finally:
        cluster.close()


def check_controller_outlives_head(cluster: DurableHead, folder: Path) -> None:
    """Nothing but the head's processes is lost: the job's own goes on, repairs, and ends the job,
    of which nothing is left once the head is back."""
    cluster.start_controller_node()
    client = start_driver(cluster, "begin_other", folder)
    ledger = folder / "other" / "ledger"
    wait_until((folder / READY).exists, LIMIT_S, "two ranks")
    (controller,) = cluster.processes("ray::JobActor")
    generations = len(steps_by_generation(ledger))
    cluster.lose_head()
    killed, kept = cluster.processes("ray::WorkerActor")
    os.kill(killed, signal.SIGKILL)
    wait_until(
        lambda: (
            len(steps := steps_by_generation(ledger)) > generations and len(steps[-1]) > STEPS_ALONE
        ),
        LIMIT_S,
        "training after a repair without a head",
    )
    before, after = steps_by_generation(ledger)[-2:]
    assert 0 <= before[-1] + 1 - after[0] <= 1, "the newest step may not have been reported"
    assert cluster.processes("ray::WorkerActor") == {kept}, "nothing can be started"
    cluster.start_head()
    wait_until(lambda: len(cluster.processes("ray::WorkerActor")) == 2, LIMIT_S, "the replacement")
    cluster.lose_head()
    (folder / STOP).touch()
    assert read_reply(client) == {"owned": 7, "ended": True}
    assert journal(folder / "other")[-1]["kind"] == "ended"
    assert cluster.processes("ray::JobActor") == {controller}
    cluster.start_head()
    wait_until(lambda: not cluster.processes(*TITLES), LIMIT_S, "the end of all processes")
    assert run_driver(cluster, "find_end", folder) == {"left": [], "state": "stopped"}


def steps_by_generation(ledger: Path) -> list[list[int]]:
    """The steps that all ranks of each generation have finished."""
    found = []
    for number in sorted({file.name.split("-rank-")[0] for file in ledger.rglob("*.jsonl")}):
        ranks = [
            {json.loads(line)["step"] for line in file.open()}
            for file in ledger.rglob(f"{number}-rank-*.jsonl")
        ]
        found.append(sorted(set.intersection(*ranks)))
    return found


def journal(folder: Path) -> list[dict[str, Any]]:
    return [*map(json.loads, (folder / "events.jsonl").open())]


def run_driver(cluster: DurableHead, stage: str, folder: Path) -> dict[str, Any]:
    return read_reply(start_driver(cluster, stage, folder))


def start_driver(cluster: DurableHead, stage: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", __name__, stage, str(folder), cluster.address]
    output = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, env=cluster.env, stdout=output, stderr=output, text=True
    )


def read_reply(driver: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = driver.communicate(timeout=3 * LIMIT_S)
    assert driver.returncode == 0, output + errors
    reply: dict[str, Any] = json.loads(output.splitlines()[-1])
    return reply


def begin(folder: Path, address: str) -> dict[str, Any]:
    event_log = EventLog()
    handle = job(folder, "steady").submit(address=address, observer=event_log)
    wait_for(handle, lambda: latest_step(event_log) > 10 and bool(event_log.of(RoleWorkerReady)))
    return {}


def go_on(folder: Path, address: str) -> dict[str, Any]:
    """Attach to the job once Ray has restarted its process, and follow it."""
    event_log = EventLog()
    handle = attach(address, event_log)
    wait_for(handle, lambda: len(event_log.of(StepRecord)) > 10 and world_size(event_log) == 2)
    return {}


def attach(address: str, event_log: EventLog) -> JobHandle:
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return Job.attach("steady", address, event_log)
        except (ConfigError, JobUnavailableError):  # not yet there, or restarting
            assert time.monotonic() < deadline
            time.sleep(0.2)


def lose_process(folder: Path, address: str) -> dict[str, Any]:
    """Its process is gone for good, as after many restarts: what it left ends itself."""
    with closing(connect(address)):
        process = JobProcess.find("steady")
        assert process is not None
        ray.kill(process.actor)
        wait_until(lambda: not has_process("steady"), LIMIT_S, "the end of the job's process")
        wait_until(lambda: not find_owned("steady"), LIMIT_S, "the end of orphans")
        return {"left": [str(owned) for owned in find_owned()]}


def begin_other(folder: Path, address: str) -> dict[str, Any]:
    """Stop it at the test's command, with or without a head."""
    event_log = EventLog()
    other = job(folder, "other", workers=Workers(min=1, max=2))
    handle = other.submit(address=address, observer=event_log)
    wait_for(handle, lambda: latest_step(event_log) > 3 and world_size(event_log) == 2)
    wait_for(handle, lambda: bool(event_log.of(RoleWorkerReady)))
    owned = len(find_owned("other"))  # three workers, their reservations, a vault
    (folder / READY).touch()
    wait_for(handle, lambda: (folder / STOP).exists())
    handle.stop()
    return {"owned": owned, "ended": handle.wait(LIMIT_S)}


def find_end(folder: Path, address: str) -> dict[str, Any]:
    with closing(connect(address)):
        ended = load_ended("other")
        assert ended is not None
        return {"left": [str(owned) for owned in find_owned()], "state": ended.status.state}


def judge(ctx: RoleContext) -> None:
    while True:
        ctx.wait(0.1)


def job(folder: Path, name: str, **changes: Any) -> Job:
    """Whose only copies of the state are in memory."""
    role = Role(judge, workers=Workers(min=1, cpus=1))
    return steady_job(
        folder,
        name,
        ledger=True,
        roles={"judge": role},
        args={"pause_s": 0.1},
        checkpoint={"path": str(folder), "every_steps": 1_000_000},
        recovery={"mirror_every": 1, "orphan_s": 60},
        **changes,
    )


STAGES = begin, go_on, lose_process, begin_other, find_end

if __name__ == "__main__":
    stage = {it.__name__: it for it in STAGES}[sys.argv[1]]
    print(json.dumps(stage(Path(sys.argv[2]), sys.argv[3])), flush=True)

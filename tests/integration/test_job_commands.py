"""Job commands inside and outside of a cluster with token authentication; a lost head."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayzero.orchestrator.journal.files import read_journal
from tests.integration.command_server import CommandServer
from tests.integration.steady_job import ENGINE
from tests.support.token_head import TokenHead, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 200


class TokenCluster:
    """A restartable head with token authentication, and commands that connect to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.head = TokenHead(folder, cpus=3)
        self.head.start()
        self._commands = CommandServer(self.head.env, ROOT)

    def close(self) -> None:
        self._commands.close()
        self.head.close()

    def run_outside(self, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rayzero", *map(str, words)],
            cwd=ROOT,
            env=self.head.env | env,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def run_inside(self, *words: object) -> subprocess.CompletedProcess[str]:
        return self._commands.run(*words, "--address", self.head.address)

    def job_file(self, name: str, **changes: Any) -> Path:
        document = {
            "name": name,
            "entrypoint": "tests.integration.jobs.steady:train",
            "engine": ENGINE,
            "workers": {"min": 1},
            "steps": 1_000_000,
            "args": {"api_key": "very-secret"},
            "checkpoint": {"path": str(self.runs), "every_steps": 20},
            **changes,
        }
        folder = self.folder / "files"
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    def status(self, name: str) -> dict[str, Any]:
        done = self.run_inside("status", name, "--json", "--path", self.runs)
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)
        return status


def wait_until(condition: Callable[[], bool]) -> None:
    wait_for(condition, TIMEOUT_S, "the job")


def journal_step(folder: Path) -> int:
    """The latest step in the journal. Cheap to poll, whereas a command takes seconds."""
    journal = read_journal(str(folder))
    return 0 if journal is None else journal.step


def checkpoint_step(folder: Path) -> int:
    """Step of the latest checkpoint; older ones are pruned."""
    manifests = folder.glob("step-*/manifest.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in manifests), default=0)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenCluster]:
    with closing(TokenCluster(tmp_path_factory.mktemp("cluster"))) as cluster:
        yield cluster


def test_job_commands_and_runs_that_survive_a_lost_head(cluster: TokenCluster):
    """Jobs are submitted from outside and inside the cluster; its head is killed and replaced.

    One job is adopted by another submit, scaled, queried and stopped; the other is marked as
    stopped.
    """
    _assert_wrong_token_is_rejected(cluster)
    listing = ("ls", "--json", "--address", cluster.head.dashboard)
    first = cluster.run_outside(*listing)
    assert (first.returncode, "has no command server yet" in first.stderr) == (0, True), first
    wait_until(lambda: cluster.run_outside(*listing).stderr == "")  # the first one has started it
    path = cluster.job_file("adopted")
    submitted = cluster.run_outside("submit", path, "--address", cluster.head.dashboard)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    follow = f"`rayzero logs -f adopted --address {cluster.head.dashboard}` follows it"
    assert f"adopted: submitted; {follow}\n" == submitted.stdout, "without lines of Ray's"
    assert submitted.stderr == ""
    assert cluster.run_inside("submit", cluster.job_file("abandoned")).returncode == 0
    wait_until(lambda: journal_step(cluster.runs / "adopted") > 25)
    status = cluster.run_outside("status", "adopted", "--address", cluster.head.dashboard)
    assert (status.returncode, status.stderr) == (0, ""), status.stdout
    assert "adopted: running at step " in status.stdout
    lost = _assert_head_is_lost(cluster, path)
    _assert_lost_run_is_adopted(cluster, path, lost)
    scaled = cluster.run_inside("scale", "adopted", "1:2").stdout
    assert scaled == "adopted: 1 to 2 workers wanted; it has 1\n"
    listed = json.loads(cluster.run_inside("ls", "--json", "--path", cluster.runs).stdout)
    found = sorted((job["name"], job["state"]) for job in listed)
    assert found == [("abandoned", "stopped"), ("adopted", "running")]
    _assert_job_is_stopped(cluster)
    files = b"".join(path.read_bytes() for path in cluster.runs.rglob("*") if path.is_file())
    assert b"very-secret" not in files
    assert cluster.head.token.encode() not in files


def _assert_wrong_token_is_rejected(cluster: TokenCluster) -> None:
    rejected = cluster.run_outside(
        "ls", "--address", cluster.head.dashboard, RAY_AUTH_TOKEN="0" * 64
    )
    assert rejected.returncode == 2, rejected.stdout
    assert rejected.stderr.startswith("error: the cluster at http://127.0.0.1:")
    assert "Traceback" not in rejected.stderr
    rejected = cluster.run_outside("ls", "--address", cluster.head.address, RAY_AUTH_TOKEN="0" * 64)
    assert rejected.returncode == 2, rejected.stdout
    assert f"the Ray cluster at '{cluster.head.address}' rejected the auth token" in rejected.stderr


def _assert_head_is_lost(cluster: TokenCluster, path: Path) -> dict[str, Any]:
    """Kills the head after a checkpoint of the job. Returns the lost job's status."""
    wait_until(
        lambda: (
            checkpoint_step(cluster.runs / "adopted") >= 40
            and journal_step(cluster.runs / "abandoned") > 0
        )
    )
    assert cluster.status("adopted")["checkpoint_step"] >= 40
    # Another cluster, too, would find the job in the folder but not the job itself.
    linked = cluster.runs / "linked"
    linked.symlink_to(cluster.runs / "adopted")
    rejected = cluster.run_inside("run", cluster.job_file("linked"))
    linked.unlink()
    assert rejected.returncode == 2, rejected.stdout
    assert f"{linked} is in use: the process " in rejected.stderr
    wait_until(lambda: journal_step(cluster.runs / "adopted") >= 40)  # written asynchronously
    cluster.head.kill()  # like a lost machine
    cluster.head.start()
    lost = cluster.status("adopted")
    assert (lost["state"], lost["generation"]) == (None, 1)
    assert lost["step"] >= 40
    changed = cluster.run_inside("run", path, "--set", "seed=3")
    assert changed.returncode == 2
    assert "    seed: 0 -> 3\n" in changed.stderr
    assert cluster.run_inside("resume", "adopted", "--path", cluster.runs).returncode == 2, (
        "the journal has no secrets"
    )
    return lost


def _assert_lost_run_is_adopted(cluster: TokenCluster, path: Path, lost: dict[str, Any]) -> None:
    assert cluster.run_inside("submit", path).returncode == 0
    stopped = cluster.run_inside("stop", "abandoned", "--path", cluster.runs)
    assert stopped.stdout.startswith("abandoned: the lost run is marked as stopped; its last step ")
    assert cluster.status("abandoned")["state"] == "stopped"
    wait_until(lambda: journal_step(cluster.runs / "adopted") > lost["step"])
    adopted = cluster.status("adopted")
    assert adopted["generation"] > 1
    assert adopted["began_at_s"] == pytest.approx(lost["began_at_s"], abs=2)
    log = cluster.run_inside("logs", "adopted").stdout
    assert f"adopted a lost run at step {lost['step']}, offline for " in log
    assert "state: running\n" in log


def _assert_job_is_stopped(cluster: TokenCluster) -> None:
    stopped = cluster.run_inside("stop", "adopted", "--path", cluster.runs)
    assert (stopped.returncode, stopped.stdout) == (0, "adopted: stopped\n"), stopped.stderr
    after = cluster.status("adopted")
    assert (after["state"], after["workers_max"]) == ("stopped", 2)
    assert after["checkpoint_step"] == after["step"]
    log = cluster.run_inside("logs", "adopted", "--path", cluster.runs).stdout
    assert "state: stopping\n" in log
    # Each run of the name has its first line, the adopting one says so, and a last one.
    began = [line for line in log.splitlines() if line.startswith("--- job adopted began at ")]
    assert [", continuing a run" in line for line in began] == [False, True]
    assert log.splitlines()[-1].startswith("--- stopped at ")
    # The cluster keeps the status too, for callers that do not know the output folder.
    status = cluster.run_inside("status", "adopted").stdout
    assert status.startswith(f"adopted: stopped at step {after['step']} of 1000000\n"), status
    listed = cluster.run_inside("ls", "--path", cluster.head.output)  # which has no job's folder
    rows = [line.split() for line in listed.stdout.splitlines()]
    assert [row[:2] for row in rows] == [["name", "state"], ["adopted", "stopped"]], listed
    assert f"{after['step']}/1000000" in rows[1]
    assert "state: stopping\n" in cluster.run_inside("logs", "adopted").stdout

"""A Ray head with dashboard, with or without token authentication, started by `ray start`."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rayzero.orchestrator.cluster.local_cluster import ForkServer
from rayzero.workers.fork_server import ADDRESS_VARIABLE
from tests.support.forking import ray_start
from tests.support.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 240.0
COMMAND_TIMEOUT_S = 600.0
OBJECT_STORE_BYTES = 80 * 2**20


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> float:
    """Wait until `condition` is true. Returns the seconds waited.

    Raises:
        TimeoutError: the condition did not become true.
    """
    start_s = asked_s = time.monotonic()
    while not condition():
        now_s = time.monotonic()
        if now_s - start_s > timeout_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        # Polling loads the polled process, and a command takes half a CPU second.
        time.sleep(max(0.05 if now_s - start_s < 5 else 0.2, 5 * (now_s - asked_s)))
        asked_s = time.monotonic()
    return time.monotonic() - start_s


class TokenHead:
    """Owns the processes of the head and its folder in /tmp, from `start` to `kill`, and a fork
    server for all of its starts, until `close`.

    Args:
        folder: for logs, and for the temporary files of all processes on the head.
        cpus: number of CPUs that Ray schedules.
        has_token: whether the cluster has token authentication.
        forks: whether workers are forked, as those of a local cluster.

    Attributes:
        token: auth token of the cluster.
        env: environment of the head and of commands.
        temporary: TMPDIR of these processes.
        output: working directory of commands.
        session: Ray's temporary folder, new after each start.
    """

    def __init__(self, folder: Path, cpus: int, has_token: bool = True, forks: bool = True) -> None:
        self.token = secrets.token_hex(32)
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.folder = folder
        self.output = folder / "work"
        self.output.mkdir()
        self._cpus = cpus
        bin_folder = Path(sys.executable).parent
        self._ray = str(bin_folder / "ray")
        self.env = {
            **{key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
        }
        if not has_token:  # it imports nothing but what is installed
            self.env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
        self._process: subprocess.Popen[bytes] | None = None
        self._fork_server: ForkServer | None = None
        if forks:
            self._fork_server = ForkServer(self.env)
            self.env[ADDRESS_VARIABLE] = self._fork_server.address
        self.session = Path()

    def start(self) -> float:
        """Start the head. Returns the seconds until it accepts jobs."""
        start_s = time.monotonic()
        # A short path: it holds Ray's sockets, whose paths are limited to 107 characters.
        self.session = Path(tempfile.mkdtemp(prefix="rz-", dir="/tmp"))
        port, dashboard, agent = free_ports(3)
        self.address, self.dashboard = f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}"
        command = [
            *ray_start(forks=self._fork_server is not None),
            *("--head", "--block", "--disable-usage-stats"),
            *("--no-monitor", "--include-log-monitor=false"),  # rayzero uses neither
            *("--include-dashboard=true", "--dashboard-host=127.0.0.1"),
            *("--node-ip-address=127.0.0.1", f"--num-cpus={self._cpus}"),
            *(f"--port={port}", f"--dashboard-port={dashboard}"),
            f"--dashboard-agent-listen-port={agent}",
            *(f"--temp-dir={self.session}", f"--object-store-memory={OBJECT_STORE_BYTES}"),
        ]
        with (self.folder / "head.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=self.env)
        wait_for(self._accepts_jobs, START_TIMEOUT_S, "the head's dashboard and its job agent")
        return time.monotonic() - start_s

    def _accepts_jobs(self) -> bool:
        """Whether the dashboard responds and the agent that runs jobs is registered."""
        return self.get_json("/api/jobs/") is not None and bool(
            _live_nodes(self.get_json("/api/v0/nodes"))
        )

    def processes(self, *titles: str) -> list[psutil.Process]:
        """The head process and all of its descendants; with `titles` those that begin so."""
        if self._process is None:
            return []
        found = []
        with suppress(psutil.Error):
            top = psutil.Process(self._process.pid)
            found = [top, *top.children(recursive=True)]
        for pid in self._fork_server.pids() if self._fork_server is not None else ():
            with suppress(psutil.Error):
                found += psutil.Process(pid).children(recursive=True)
        return [it for it in found if not titles or _title(it).startswith(titles)]

    def kill(self) -> None:
        """SIGKILL the head and all of its descendants, like a lost machine."""
        if self._process is None:
            return
        processes = self.processes()
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self._process.wait(20)
        psutil.wait_procs(processes, timeout=20)
        self._process = None
        shutil.rmtree(self.session, ignore_errors=True)

    def close(self) -> None:
        """As `kill`; the head does not start again."""
        self.kill()
        if self._fork_server is not None:
            self._fork_server.stop()

    def get_json(self, path: str) -> Any:
        """GET a JSON document from the dashboard. Returns None if it does not respond."""
        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(self.dashboard + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return json.loads(response.read())
        except (OSError, ValueError):
            return None

    def ray_job(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `ray job WORDS` from outside the cluster, with the token."""
        verb, *rest = words
        return self.command(self._ray, "job", verb, "--address", self.dashboard, *rest)

    def rayzero(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `rayzero WORDS` inside the cluster."""
        return self.command(sys.executable, "-m", "rayzero", *words, "--address", self.address)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            env=self.env,
            cwd=self.output,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )


def _title(process: psutil.Process) -> str:
    """Empty if it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _live_nodes(response: Any) -> list[str]:
    """Names of the live nodes in a dashboard response."""
    rows = response["data"]["result"]["result"] if response else []
    return [row["node_name"] for row in rows if row["state"] == "ALIVE"]

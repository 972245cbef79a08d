"""A Ray head with dashboard and token, started as one starts it, that can be killed whole."""

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

from benchmarks.ports import free_ports

ROOT = Path(__file__).resolve().parents[1]
START_S = 240.0
COMMAND_S = 600.0
OBJECT_STORE_BYTES = 80 * 2**20


def wait_for(there: Callable[[], Any], limit_s: float, what: str) -> float:
    """Seconds until `there` is true.

    Raises:
        TimeoutError: it never was.
    """
    began_s = time.monotonic()
    while not there():
        waited_s = time.monotonic() - began_s
        if waited_s > limit_s:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.05 if waited_s < 5 else 0.2)  # to ask costs whoever is asked
    return time.monotonic() - began_s


class TokenHead:
    """Owns the head's processes and its folder in /tmp, from `start` to `kill`.

    Args:
        folder: for its output, and for the temporary files of all that runs on it.
        cpus: that Ray believes to have.

    Attributes:
        token: without which nothing answers.
        env: of all that runs on it, and of commands.
        temporary: TMPDIR of all that.
        output: the working directory of commands.
        session: Ray's own folder; another one after each start.
    """

    def __init__(self, folder: Path, cpus: int) -> None:
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
        self._process: subprocess.Popen[bytes] | None = None
        self.session = Path()

    def start(self) -> float:
        """Seconds until the dashboard answers with the token."""
        began_s = time.monotonic()
        # A short path: Ray puts sockets there, whose paths may have 107 characters.
        self.session = Path(tempfile.mkdtemp(prefix="rz-", dir="/tmp"))
        port, dashboard, client, agent = free_ports(4)
        self.address, self.dashboard = f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}"
        command = [
            *(self._ray, "start", "--head", "--block", "--disable-usage-stats"),
            *("--include-dashboard=true", "--dashboard-host=127.0.0.1"),
            *("--node-ip-address=127.0.0.1", f"--num-cpus={self._cpus}"),
            *(f"--port={port}", f"--dashboard-port={dashboard}"),
            *(f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"),
            *(f"--temp-dir={self.session}", f"--object-store-memory={OBJECT_STORE_BYTES}"),
        ]
        with (self.folder / "head.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=self.env)
        wait_for(self._takes_jobs, START_S, "the head's dashboard and its job agent")
        return time.monotonic() - began_s

    def _takes_jobs(self) -> bool:
        """Whether the dashboard answers, and the agent that carries jobs out is there, too."""
        return self.asked("/api/jobs/") is not None and bool(_alive(self.asked("/api/v0/nodes")))

    def family(self) -> list[psutil.Process]:
        """All processes that the head began, and those began."""
        if self._process is None:
            return []
        with suppress(psutil.Error):
            top = psutil.Process(self._process.pid)
            return [top, *top.children(recursive=True)]
        return []

    def kill(self) -> None:
        """SIGKILL to the head and everything on it, as when the machine is lost."""
        if self._process is None:
            return
        family = self.family()
        for one in family:
            with suppress(psutil.Error):
                one.send_signal(signal.SIGKILL)
        self._process.wait(20)
        psutil.wait_procs(family, timeout=20)
        self._process = None
        shutil.rmtree(self.session, ignore_errors=True)

    def asked(self, path: str) -> Any:
        """JSON from the dashboard; None where it does not answer."""
        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(self.dashboard + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.loads(answer.read())
        except (OSError, ValueError):
            return None

    def ray_job(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`ray job WORDS`, from outside the cluster, with the token."""
        verb, *rest = words
        return self.command(self._ray, "job", verb, "--address", self.dashboard, *rest)

    def rayzero(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`rayzero WORDS` in the cluster."""
        return self.command(sys.executable, "-m", "rayzero", *words, "--address", self.address)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            env=self.env,
            cwd=self.output,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )


def _alive(answer: Any) -> list[str]:
    """The names of nodes that live, by the dashboard's answer."""
    rows = answer["data"]["result"]["result"] if answer else []
    return [one["node_name"] for one in rows if one["state"] == "ALIVE"]

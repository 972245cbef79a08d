"""A real Ray head with a dashboard, shared by the integration tests of jobs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.integration.nodes import Nodes
from tests.support.ports import free_ports

CPUS = 4  # more than the machine may have: test workers hardly compute


@dataclass(frozen=True)
class Head:
    """A running Ray head: its GCS address and dashboard URL."""

    address: str
    dashboard: str
    pid: int

    def processes(self, *titles: str) -> list[psutil.Process]:
        """Live child processes whose titles start with one of `titles`."""
        processes = []
        for process in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(titles):  # a zombie's is empty
                    processes.append(process)
        return processes


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    # A short path: it holds Ray's sockets, whose paths are limited to 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="rz-", dir="/tmp"))
    port, dashboard, client, agent = free_ports(4)
    command = [
        str(Path(sys.executable).with_name("ray")),
        *("start", "--head", "--block", "--disable-usage-stats", "--include-dashboard=true"),
        "--include-log-monitor=false",  # it scans all log files, for drivers that want them
        *("--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"),
        *(f"--port={port}", f"--dashboard-port={dashboard}", f"--num-cpus={CPUS}"),
        *(f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"),
        *(f"--temp-dir={folder}", f"--object-store-memory={128 * 2**20}"),
    ]
    # No drain at SIGTERM: it waits up to 30 s for detached actors, such as Ray Train's.
    no_drain = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    env = {**os.environ, **no_drain, "RAY_AUTH_MODE": "disabled"}
    with (folder / "start.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    try:
        wait_for_dashboard(f"http://127.0.0.1:{dashboard}/api/version", process, folder)
        yield Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", process.pid)
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in psutil.wait_procs(children, timeout=5)[1]:
            child.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def node_cluster() -> Iterator[Nodes]:
    """A separate cluster with short health-check timeouts, to detect lost nodes quickly."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "initial_delay_ms": "1000",
            "period_ms": "1000",
            "timeout_ms": "1000",
            "failure_threshold": "3",
        }.items():
            patch.setenv(f"RAY_health_check_{name}", value)
        cluster = Nodes()
        yield cluster
        cluster.close()


@pytest.fixture
def nodes(node_cluster: Nodes) -> Iterator[Nodes]:
    """The module's cluster of several nodes, for one test."""
    yield node_cluster
    node_cluster.end_test()


def wait_for_dashboard(url: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + 300
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                log = (folder / "start.log").read_text(errors="replace")
                raise RuntimeError(f"the head did not start:\n{log}") from error
            time.sleep(0.2)

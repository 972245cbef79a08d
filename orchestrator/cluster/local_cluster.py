"""A Ray cluster on this machine for one job. Its workers are forked from a process, the fork
server, that has imported torch and everything else they need.

This module does not import Ray, whose import takes a second: the fork server starts before that.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from rayzero.engine.errors import first_line
from rayzero.orchestrator.errors import JobFailedError
from rayzero.workers.fork_server import ADDRESS_VARIABLE

_PACKAGE_FOLDER = str(Path(__file__).parents[3])
_SERVER_CODE = """
import sys
sys.path[0:1] = []  # the folder where the command was given: a user's module may have any name
sys.path.append(sys.argv[1])
from rayzero.workers.fork_server import serve
serve(int(sys.argv[2]), sys.argv[3:])
"""
_PRELOADED = (  # names, because the orchestrator does not import torch
    "rayzero.workers.worker",
    "rayzero.workers.vault.vault",
    "rayzero.workers.agent.node_agent",
    "rayzero.workers.rollouts.server",
    "rayzero.orchestrator.control.controller",
    "rayzero.orchestrator.metrics.telemetry",
    "rayzero.orchestrator.metrics.http_server",
    "rayzero.orchestrator.job.recorder",
    "rayzero.orchestrator.job.past_runs",
    *("google.protobuf.json_format", "jsonschema", "requests", "yaml"),  # Ray's own
)
"""Modules that the fork server imports. Ray is not among them: it reads a worker's environment when
it is imported."""
_log = logging.getLogger(__name__)
_OBJECT_STORE_BYTES = 128 * 2**20  # only small objects go through it
_STOP_TIMEOUT_S = 5.0
_RAY_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
"""Environment of a local cluster, unless the user has set other values. Without `disabled`, a token
in the home folder would enable authentication."""


class ForkServer:
    """Owns the process of `rayzero.workers.fork_server`, until `stop` or the end of this process.

    Args:
        env: variables that are added to this process's environment for the workers. They are set
            in the fork server, because some are read on import.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.address = f"rayzero-fork-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + self.address)
            listener.listen(64)  # clients wait for the server's imports
            file = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVER_CODE, _PACKAGE_FOLDER, str(file), *_PRELOADED],
                stdin=subprocess.PIPE,  # the server ends when this process closes the pipe
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[file],
                env={**_RAY_SETTINGS, **os.environ, **env},
                start_new_session=True,  # Ctrl-C must only reach this process
            )

    def pids(self) -> list[int]:
        return [self._process.pid] if self._process.poll() is None else []

    def stop(self) -> None:
        """Kills the server, which has nothing to write or to release. Idempotent."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_S)
        if self._process.stdin is not None:
            self._process.stdin.close()


class LocalCluster:
    """Owns Ray's processes and the fork server until `stop` or `kill`, or the end of this process.
    Ray supports only one cluster in a process.

    Args:
        worker_env: `env` of the `ForkServer`; None to let Ray start workers without a fork server.
    """

    def __init__(self, worker_env: Mapping[str, str] | None) -> None:
        for name, value in _RAY_SETTINGS.items():
            os.environ.setdefault(name, value)
        self._fork_server = None if worker_env is None else ForkServer(worker_env)
        self._has_ray = False

    def start(self) -> None:
        """Starts Ray. Raises JobFailedError if it does not start."""
        self._has_ray = True
        if self._fork_server is not None:
            os.environ[ADDRESS_VARIABLE] = self._fork_server.address  # for Ray's processes
        try:
            self._start_ray()
        except BaseException:  # such as Ctrl-C
            self.kill()
            self.stop()
            raise
        finally:
            os.environ.pop(ADDRESS_VARIABLE, None)

    def _start_ray(self) -> None:
        from rayzero.orchestrator.cluster import ray_api

        for tries_left in (2, 1, 0):
            try:
                ray_api.start_head(_OBJECT_STORE_BYTES, forks=self._fork_server is not None)
                return
            except Exception as error:  # noqa: BLE001  # Ray raises Exception: slow start, full disk
                kill_trees(ray_api.head_pids())
                ray_api.stop_ray()
                seen = first_line(error)
                if tries_left and "timed out" in seen:
                    # Ray allows 30 s, which a busy machine may exceed.
                    _log.warning("Ray did not start in time, trying again: %s", seen)
                    continue
                raise JobFailedError(
                    f"a Ray cluster could not be started on this machine: {seen}",
                    allowed="an idle core for some seconds, and free space in /tmp and /dev/shm",
                    fix="run `rayzero doctor` for the cause; or use a running cluster: --address",
                ) from None

    def stop(self) -> None:
        """Ends Ray's processes in order, then the fork server. Idempotent."""
        if self._has_ray:
            from rayzero.orchestrator.cluster.ray_api import stop_ray

            stop_ray()
        if self._fork_server is not None:
            self._fork_server.stop()

    def kill(self) -> None:
        """Ends every process of the cluster at once. Idempotent; safe in a signal handler."""
        roots = [] if self._fork_server is None else self._fork_server.pids()
        if self._has_ray:
            from rayzero.orchestrator.cluster.ray_api import head_pids

            roots += head_pids()
        kill_trees(roots)


def kill_trees(roots: Iterable[int]) -> None:
    """Kills processes and all their descendants. All are stopped (SIGSTOP) before the first is
    killed, so that none can start another process meanwhile."""
    stopped: set[int] = set()
    while found := set(roots) - stopped:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= found
        roots = _children(stopped)
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children(parents: set[int]) -> set[int]:
    children = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with suppress(OSError):  # the process has ended
                stat = Path(entry.path, "stat").read_text()
                if int(stat.rpartition(")")[2].split()[1]) in parents:
                    children.add(int(entry.name))
    return children

"""From outside a cluster: the same command, run in it through Ray's job API."""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ray.exceptions import RayError
from ray.job_submission import JobSubmissionClient

from rayzero.engine.errors import ConfigError, RayzeroError, first_line
from rayzero.engine.masking import HIDDEN, is_secret, masked
from rayzero.orchestrator.errors import JobFailedError

_FAILURES = (ConnectionError, RuntimeError, ValueError, OSError, RayError)


class OtherCluster:
    """A cluster by its dashboard's address. The token of RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or
    ~/.ray/auth_token goes with every request where RAY_AUTH_MODE says so."""

    def __init__(self, address: str) -> None:
        """
        Raises:
            ConfigError: nothing answers there, or it does not let us in.
        """
        self._address = address
        # It tells of each connection's end.
        logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.WARNING)
        try:
            self._client = JobSubmissionClient(address)
        except _FAILURES as error:
            raise self._told(error, ConfigError) from None

    def begin(self, arguments: Sequence[str], folder: Path | None) -> str:
        """Starts `rayzero ARGUMENTS` in the cluster; its id among Ray's jobs.

        Args:
            folder: goes along as the command's working directory.

        Raises:
            ConfigError: it is not taken, or a secret is among the arguments.
        """
        _refuse_secrets(arguments)
        command = shlex.join(["python3", "-m", "rayzero", *arguments])
        env = {} if folder is None else {"working_dir": str(folder)}
        try:
            return str(self._client.submit_job(entrypoint=command, runtime_env=env))
        except _FAILURES as error:
            raise self._told(error, ConfigError) from None

    def follow(self, job: str, write: Callable[[str], object]) -> int:
        """Hands on what it prints; its exit code."""
        try:
            asyncio.run(self._tail(job, write))
            info = self._client.get_job_info(job)
        except _FAILURES as error:
            raise self._told(error, JobFailedError) from None
        if info.driver_exit_code is not None:
            return int(info.driver_exit_code)
        return 0 if info.status == "SUCCEEDED" else 1

    def end(self, job: str) -> None:
        """Ends a command that was begun, where it has not ended by itself; asks once only."""
        with suppress(*_FAILURES):
            self._client.stop_job(job)

    async def _tail(self, job: str, write: Callable[[str], object]) -> None:
        own = WithoutHead(write)
        async for text in self._client.tail_job_logs(job):
            own.write(text)
        own.flush()

    def _told(self, error: Exception, kind: type[RayzeroError]) -> RayzeroError:
        text = first_line(error)
        return kind(
            masked(f"the cluster at {self._address} did not take it: {text}"),
            allowed="the address of a Ray dashboard, such as http://HOST:8265",
            fix="--address; RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH where it wants a token",
        )


class WithoutHead:
    """Hands on what a command of ours prints, without the lines that Ray puts before it: who reads
    `--json` wants nothing else."""

    _OF_RAY = re.compile(r"\d{4}-\d\d-\d\d \S+\s+\w+ job_manager\.py|Running entrypoint for job ")

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._head: str | None = ""  # what may be Ray's still; None behind it

    def write(self, text: str) -> None:
        if self._head is None:
            self._write(text)
            return
        self._head += text
        while "\n" in self._head:
            line, _, rest = self._head.partition("\n")
            if not self._OF_RAY.match(line):
                self.flush()
                return
            self._head = rest

    def flush(self) -> None:
        if self._head:
            self._write(self._head)
        self._head = None


def _refuse_secrets(arguments: Sequence[str]) -> None:
    """Ray shows a job's command to everybody who may see its jobs, and so does `ps` on the head."""
    for word in arguments:
        key, _, value = word.partition("=")
        if masked(word) != word or (value and is_secret(key.rpartition(".")[2])):
            told = masked(
                f"{key}={HIDDEN}" if value and is_secret(key.rpartition(".")[2]) else word
            )
            raise ConfigError(
                f"{told} holds a secret, and would be shown in the cluster's list of jobs",
                allowed="secrets in the environment of the cluster's nodes, or in the job file",
                fix="the argument; credentials of stores: their environment variables",
            )

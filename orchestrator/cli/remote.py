"""Run this command in another cluster; exit codes.

From outside a cluster: the same command, run in it through Ray's job API.

Hands a command on to a cluster that this machine is no part of.

Exit codes of commands that do one thing and end.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import typer
from ray.exceptions import RayError
from ray.job_submission import JobSubmissionClient

from rayzero.engine.errors import ConfigError, RayzeroError, first_line
from rayzero.engine.redact import REDACTED, is_secret_key, redact_url
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.event_text import print_error

_CLIENT_ERRORS = (ConnectionError, RuntimeError, ValueError, OSError, RayError)


class RemoteJobClient:
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
        except _CLIENT_ERRORS as error:
            raise self._rejected_error(error, ConfigError) from None

    def submit(self, arguments: Sequence[str], folder: Path | None) -> str:
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
        except _CLIENT_ERRORS as error:
            raise self._rejected_error(error, ConfigError) from None

    def follow(self, job: str, write: Callable[[str], object]) -> int:
        """Hands on what it prints; its exit code."""
        try:
            asyncio.run(self._tail(job, write))
            info = self._client.get_job_info(job)
        except _CLIENT_ERRORS as error:
            raise self._rejected_error(error, JobFailedError) from None
        if info.driver_exit_code is not None:
            return int(info.driver_exit_code)
        return 0 if info.status == "SUCCEEDED" else 1

    def stop(self, job: str) -> None:
        """Ends a command that was begun, where it has not ended by itself; asks once only."""
        with suppress(*_CLIENT_ERRORS):
            self._client.stop_job(job)

    async def _tail(self, job: str, write: Callable[[str], object]) -> None:
        own = StripRayPreamble(write)
        async for text in self._client.tail_job_logs(job):
            own.write(text)
        own.flush()

    def _rejected_error(self, error: Exception, kind: type[RayzeroError]) -> RayzeroError:
        text = first_line(error)
        return kind(
            redact_url(f"the cluster at {self._address} did not take it: {text}"),
            allowed="the address of a Ray dashboard, such as http://HOST:8265",
            fix="--address; RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH where it wants a token",
        )


class StripRayPreamble:
    """Hands on what a command of ours prints, without the lines that Ray puts before it: who reads
    `--json` wants nothing else."""

    _RAY_LINE = re.compile(r"\d{4}-\d\d-\d\d \S+\s+\w+ job_manager\.py|Running entrypoint for job ")

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._pending: str | None = ""  # what may be Ray's still; None behind it

    def write(self, text: str) -> None:
        if self._pending is None:
            self._write(text)
            return
        self._pending += text
        while "\n" in self._pending:
            line, _, rest = self._pending.partition("\n")
            if not self._RAY_LINE.match(line):
                self.flush()
                return
            self._pending = rest

    def flush(self) -> None:
        if self._pending:
            self._write(self._pending)
        self._pending = None


def _refuse_secrets(arguments: Sequence[str]) -> None:
    """Ray shows a job's command to everybody who may see its jobs, and so does `ps` on the head."""
    for word in arguments:
        key, _, value = word.partition("=")
        if redact_url(word) != word or (value and is_secret_key(key.rpartition(".")[2])):
            told = redact_url(
                f"{key}={REDACTED}" if value and is_secret_key(key.rpartition(".")[2]) else word
            )
            raise ConfigError(
                f"{told} holds a secret, and would be shown in the cluster's list of jobs",
                allowed="secrets in the environment of the cluster's nodes, or in the job file",
                fix="the argument; credentials of stores: their environment variables",
            )


def run_remotely(
    address: str | None,
    *arguments: object,
    sets: Sequence[str] | None = None,
    as_json: bool = False,
    folder: Path | None = None,
) -> None:
    """Runs the command there and ends this process with its exit code, if `address` is that of a
    dashboard; else does nothing.

    Args:
        folder: goes along; arguments that are paths in it are given as they are found from it.
    """
    if address is None or not address.startswith(("http://", "https://")):
        return
    # Here, because it brings ray with it, and `--help` must not wait for it.

    words = [one.name if isinstance(one, Path) else str(one) for one in arguments]
    words += [word for one in sets or () for word in ("--set", one)]
    words += ["--json"] * as_json

    @with_exit_code
    def run() -> int:
        cluster = RemoteJobClient(address)
        job = cluster.submit(words, None if folder is None else folder.resolve())
        return cluster.follow(job, sys.stdout.write)

    raise typer.Exit(run())


P = ParamSpec("P")


def with_exit_code(command: Callable[P, int]) -> Callable[P, int]:
    """Errors as text on stderr: 2 for what the user wrote, 1 for what was found."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except RayzeroError as error:
            print_error(error)
            return 2 if isinstance(error, ConfigError) else 1
        except KeyboardInterrupt:
            return 130

    return run

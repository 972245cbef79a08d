"""Runs `rayzero` commands through Ray's job API, in a cluster that this machine is not part of. The
code of a folder is uploaded, but not its results.

Ray leaves `.git`, `.venv` and the files that .gitignore and .rayignore name out of an upload. This
module also leaves out virtual environments of any name, jobs' checkpoints, and files that are too
large to be code.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ray.exceptions import RayError
from ray.job_submission import JobSubmissionClient

from rayzero.engine.errors import ConfigError, RayzeroError, first_line
from rayzero.engine.redact import REDACTED, is_secret_key, redact_url
from rayzero.orchestrator.cluster.addresses import CLIENT_ADDRESS_VARIABLE, only_given_address
from rayzero.orchestrator.cluster.ray_api import visit_uploaded_files
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.journal.files import EVENTS_FILE, STATE_FILE

_RAY_LINE = re.compile(r"\d{4}-\d\d-\d\d \S+\s+\w+ job_manager\.py|Running entrypoint for job ")
_RAY_LOGGERS = {
    "ray.dashboard.modules.job.sdk": logging.WARNING,  # hides the end of each connection
    "ray.dashboard.modules.dashboard_sdk": logging.WARNING,  # hides each upload
    "ray._private.runtime_env": logging.ERROR,  # hides what Ray leaves out of an upload
}
"""Loggers of Ray's client, with the lowest level that users see."""
_TOO_LARGE = re.compile(r"status code 413|body size|exceeds the maximum size")
_CLIENT_ERRORS = (ConnectionError, RuntimeError, ValueError, OSError, RayError)
LIMIT_VARIABLE = "RAYZERO_UPLOAD_MAX_FILE_BYTES"
_DEFAULT_MAX_FILE_BYTES = 10 * 2**20
_SPECIAL = re.compile(r"([*?\[\]!#\\ ])")  # in a line of .gitignore
_SHOWN = 3


@dataclass(frozen=True)
class Upload:
    """The files of `folder` that are uploaded.

    Attributes:
        sizes: size in bytes of each file that is uploaded, by its path in the folder.
        left_out: why a path is not uploaded, by path. A folder stands for all that it contains.
    """

    folder: Path
    sizes: dict[str, int]
    left_out: dict[str, str]

    @property
    def runtime_env(self) -> dict[str, object]:
        """Ray's runtime environment with these files. It excludes paths by .gitignore patterns."""
        patterns = ["/" + _SPECIAL.sub(r"\\\1", path) for path in self.left_out]
        return {"working_dir": str(self.folder), "excludes": patterns}

    def describe(self) -> list[str]:
        """Returns a line for each reason to leave something out, with the first paths."""
        paths_by_reason: dict[str, list[str]] = {}
        for path, why in self.left_out.items():
            paths_by_reason.setdefault(why, []).append(path)
        return [
            f"not uploaded, as {why}: {', '.join(paths[:_SHOWN])}"
            + (f" and {len(paths) - _SHOWN} others" if len(paths) > _SHOWN else "")
            for why, paths in paths_by_reason.items()
        ]

    def too_large_error(self, address: str) -> ConfigError:
        """Returns the error for a cluster that has rejected the size of the upload."""
        largest = sorted(self.sizes, key=lambda path: -self.sizes[path])[:_SHOWN]
        listed = ", ".join(f"{path} ({_megabytes(self.sizes[path])})" for path in largest)
        return ConfigError(
            f"the folder {self.folder} is too large for the cluster at {address}: "
            f"{len(self.sizes)} files of {_megabytes(sum(self.sizes.values()))}, "
            f"the largest of them {listed}",
            allowed="100 MB, compressed",
            fix="name what is not code in a .rayignore file (it is read like .gitignore), and "
            "read data from storage that the nodes can reach",
        )


def select_upload(folder: Path) -> Upload:
    """Decides which files of a folder are uploaded. Raises ConfigError if the environment variable
    that limits the size of a file is not a number."""
    folder, limit_bytes = folder.resolve(), _max_file_bytes()
    sizes: dict[str, int] = {}
    left_out: dict[str, str] = {}

    def is_left_out(path: Path) -> bool:
        why = _why_left_out(path, limit_bytes) if path != folder else ""
        if why:
            left_out[str(path.relative_to(folder))] = why
        return bool(why)

    def add(path: Path) -> None:
        if path.is_file():
            sizes[str(path.relative_to(folder))] = path.stat().st_size

    visit_uploaded_files(folder, is_left_out, add)
    return Upload(folder, sizes, dict(sorted(left_out.items())))


def _why_left_out(path: Path, limit_bytes: int) -> str:
    """Returns why a path is not uploaded; an empty string if it is uploaded."""
    if path.is_dir():
        if (path / "pyvenv.cfg").is_file():
            return "a virtual environment"
        if (path / STATE_FILE).is_file() and (path / EVENTS_FILE).is_file():
            return "checkpoints and journal of a job"
        if path == Path(tempfile.gettempdir()).resolve():  # Ray packs the upload there
            return "temporary files"
        return ""
    if path.is_file() and path.stat().st_size > limit_bytes:
        return (
            f"over {_megabytes(limit_bytes)} (the nodes should read data from storage that they "
            f"share; {LIMIT_VARIABLE} sets the limit)"
        )
    return ""


def _max_file_bytes() -> int:
    text = os.environ.get(LIMIT_VARIABLE, str(_DEFAULT_MAX_FILE_BYTES))
    if not text.isdecimal():
        raise ConfigError(f"{LIMIT_VARIABLE}={text}", allowed="a number of bytes")
    return int(text)


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


class RemoteJobClient:
    """Ray's job API at a dashboard's address.

    With RAY_AUTH_MODE=token every request carries the token of RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH
    or ~/.ray/auth_token.
    """

    def __init__(self, address: str) -> None:
        """Raises ConfigError if no dashboard responds there, or it rejects the token."""
        self._address = address
        for name, level in _RAY_LOGGERS.items():
            logging.getLogger(name).setLevel(level)
        try:
            with only_given_address():
                self._client = JobSubmissionClient(address)
        except _CLIENT_ERRORS as error:
            raise self._rejected_error(error, ConfigError) from None

    def submit(self, arguments: Sequence[str], upload: Upload | None) -> str:
        """Starts `rayzero ARGUMENTS` in the cluster, with `upload` as its working directory.
        Returns the id of the Ray job. Raises ConfigError if the cluster rejects the request, or an
        argument contains a secret."""
        _refuse_secrets(arguments)
        command = shlex.join(["python3", "-m", "rayzero", *arguments])
        env: dict[str, object] = {"env_vars": {CLIENT_ADDRESS_VARIABLE: redact_url(self._address)}}
        env |= {} if upload is None else upload.runtime_env
        try:
            return str(self._client.submit_job(entrypoint=command, runtime_env=env))
        except _CLIENT_ERRORS as error:
            if upload is not None and _TOO_LARGE.search(str(error)):
                raise upload.too_large_error(redact_url(self._address)) from None
            raise self._rejected_error(error, ConfigError) from None

    def follow(self, job: str, show_line: Callable[[str], object]) -> int:
        """Shows each line of the command's output until it ends. Returns the exit code."""
        try:
            asyncio.run(self._tail(job, show_line))
            info = self._client.get_job_info(job)
        except _CLIENT_ERRORS as error:
            raise self._rejected_error(error, JobFailedError) from None
        if info.driver_exit_code is not None:
            return int(info.driver_exit_code)
        return 0 if info.status == "SUCCEEDED" else 1

    def stop(self, job: str) -> None:
        """Stops the command if it still runs. Tries only once, and ignores errors."""
        with suppress(*_CLIENT_ERRORS):
            self._client.stop_job(job)

    async def _tail(self, job: str, show_line: Callable[[str], object]) -> None:
        """Shows the command's output without the lines that Ray prints before it, so that the
        output of `--json` is only JSON."""
        incomplete, in_preamble = "", True
        async for text in self._client.tail_job_logs(job):
            *lines, incomplete = (incomplete + text).split("\n")
            for line in lines:
                in_preamble = in_preamble and _RAY_LINE.match(line) is not None
                if not in_preamble:
                    show_line(line)
        if incomplete:
            show_line(incomplete)

    def _rejected_error(self, error: Exception, kind: type[RayzeroError]) -> RayzeroError:
        text = first_line(error)
        return kind(
            redact_url(f"the cluster at {self._address} rejected the request: {text}"),
            allowed="the address of a Ray dashboard, such as http://HOST:8265",
            fix="check --address; for a cluster with token authentication set RAY_AUTH_MODE and "
            "RAY_AUTH_TOKEN_PATH",
        )


def _refuse_secrets(arguments: Sequence[str]) -> None:
    """Raises ConfigError if an argument contains a secret, because Ray shows a job's command line
    to everybody with access to its dashboard."""
    for word in arguments:
        key, _, value = word.partition("=")
        has_secret_key = bool(value) and is_secret_key(key.rpartition(".")[2])
        if has_secret_key or redact_url(word) != word:
            shown = redact_url(f"{key}={REDACTED}" if has_secret_key else word)
            raise ConfigError(
                f"{shown} contains a secret, and Ray's list of jobs would show it",
                allowed="secrets in the job file or in the environment of the cluster's nodes",
                fix="remove the argument; pass credentials of stores as environment variables",
            )

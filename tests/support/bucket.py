"""A local S3 bucket, served by moto in a subprocess."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyarrow import fs

from tests.support.ports import free_ports

START_TIMEOUT_S = 60


def find_moto_server() -> str:
    """Path of the moto_server executable. Skips the test if it is not installed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    executable = shutil.which("moto_server", path=path)
    if executable is None:
        pytest.skip("needs moto_server: pip install 'moto[s3]' flask flask-cors")
    return executable


@contextmanager
def bucket_options() -> Iterator[str]:
    """Start a server with an empty bucket `bucket` and yield the URL options for it.

    The server accepts any credentials.
    """
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [find_moto_server(), "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(port):
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)
        options = f"endpoint_override=127.0.0.1:{port}&scheme=http"
        filesystem, _ = fs.FileSystem.from_uri(
            f"s3://k:s@bucket?{options}&region=us-east-1&allow_bucket_creation=true"
        )
        filesystem.create_dir("bucket")
        yield options
    finally:
        process.kill()
        process.wait(10)


@contextmanager
def bucket_url() -> Iterator[str]:
    """Yield the URL of an empty bucket, with credentials in the environment."""
    with pytest.MonkeyPatch.context() as patch, bucket_options() as options:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_REGION", "us-east-1")
        yield f"s3://bucket?{options}"


def _is_ready(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/data.json", timeout=5).close()
    except OSError:
        return False
    return True

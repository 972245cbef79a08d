"""An S3 bucket on this machine: moto's server, in a process of its own."""

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

from benchmarks.ports import free_ports

STARTED_S = 60


def server() -> str:
    """Where the server is; skips the test where it is not."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which("moto_server", path=path)
    if found is None:
        pytest.skip("needs moto_server: pip install 'moto[s3]' flask flask-cors")
    return found


@contextmanager
def bucket_options() -> Iterator[str]:
    """The options that a URL of the empty bucket `bucket` needs; takes any credentials."""
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [server(), "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until_s = time.monotonic() + STARTED_S
        while not _answers(port):
            assert time.monotonic() < until_s, "the server did not start"
            time.sleep(0.1)
        options = f"endpoint_override=127.0.0.1:{port}&scheme=http"
        made, _ = fs.FileSystem.from_uri(
            f"s3://k:s@bucket?{options}&region=us-east-1&allow_bucket_creation=true"
        )
        made.create_dir("bucket")
        yield options
    finally:
        process.kill()
        process.wait(10)


@contextmanager
def bucket_url() -> Iterator[str]:
    """The URL of the empty bucket, with credentials in the environment as long as it is open."""
    with pytest.MonkeyPatch.context() as patch, bucket_options() as options:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_REGION", "us-east-1")
        yield f"s3://bucket?{options}"


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/data.json", timeout=5).close()
    except OSError:
        return False
    return True

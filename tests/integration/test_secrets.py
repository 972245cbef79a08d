"""Secrets passed to a job by every route must not appear in anything it exposes or writes."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from pyarrow import fs
from typer.testing import CliRunner

from rayzero.orchestrator.cli.app import app
from rayzero.orchestrator.metrics.jobs_page import JobsPage
from tests.integration.leak_sources import (
    read_command_lines,
    read_files,
    read_metrics_server,
    read_ray_state,
)
from tests.integration.steady_job import ENGINE
from tests.support.bucket import bucket_options
from tests.support.ports import free_ports
from tests.support.token_head import TokenHead, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TIMEOUT_S = 240.0
ARGUMENT, ENVIRONMENT, STORE = (f"pl4nted-{kind}-9f3a" for kind in ("arg", "env", "store"))


@pytest.fixture(scope="module")
def options() -> Iterator[str]:
    with bucket_options() as url_options:
        yield f"{url_options}&region=us-east-1"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenHead]:
    token_head = TokenHead(tmp_path_factory.mktemp("head"), cpus=3)
    token_head.env |= {"WANDB_API_KEY": ENVIRONMENT, "AWS_SECRET_ACCESS_KEY": ENVIRONMENT}
    try:
        token_head.start()
        yield token_head
    finally:
        token_head.close()


def job_file(folder: Path, options: str, port: int, **args: str) -> Path:
    document = {
        "name": "secretive",
        "entrypoint": "tests.integration.jobs.steady:train",
        "args": {"api_key": ARGUMENT, **args},
        "engine": ENGINE,
        "workers": {"min": 1, "max": 2},
        "steps": 1_000_000,
        "checkpoint": {"path": f"s3://AKIA:{STORE}@bucket/runs?{options}", "every_steps": 25},
        "metrics": {"port": port, "jsonl": True, "tensorboard": True},
        "faults": ["kill(rank=1, step=30)", "full_disk(step=40)"],
    }
    folder.mkdir(exist_ok=True)
    path = folder / "secretive.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def test_secrets_are_not_exposed_or_written(
    head: TokenHead, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (port,) = free_ports(1)
    path = job_file(tmp_path / "job", options, port)
    url = f"http://127.0.0.1:{port}"
    commands = [head.rayzero("submit", str(path))]
    assert commands[0].returncode == 0, commands[0].stderr

    def has_recovered_and_checkpointed() -> bool:
        try:
            with urlopen(f"{url}/snapshot.json", timeout=20) as response:
                snapshot = json.loads(response.read())
        except OSError:
            return False
        return bool(
            snapshot["recoveries"] and snapshot["checkpoints"] and snapshot["progress"]["step"] > 60
        )

    wait_for(has_recovered_and_checkpointed, TIMEOUT_S, "a repair and a checkpoint")
    while_running = dict(
        chain(read_metrics_server(url), read_ray_state(head), read_command_lines())
    )
    assert {"/", "/metrics", "/snapshot.json", "/history.json"} <= while_running.keys()
    other = job_file(tmp_path / "job", options, port, api_key=ARGUMENT + "-other")
    rejected = head.rayzero("submit", str(other))
    assert rejected.returncode == 2
    assert "args.api_key: *** -> ***" in rejected.stderr
    status = ("status", "secretive")
    queries = [("ls", "--json"), status, (*status, "--json"), ("logs", "secretive")]
    commands += [head.rayzero(*args) for args in (*queries, ("stop", "secretive"))]
    assert [done.returncode for done in commands] == [0] * len(commands), commands[-1].stderr
    assert "checkpoint of step" in commands[-2].stdout
    printed = {
        f"command {index}": (done.stdout + done.stderr).encode()
        for index, done in enumerate([*commands, rejected])
    }
    written = dict(read_files(head.folder, head.session, head.output))
    stored = dict(read_bucket(options))
    assert any(name.endswith("manifest.json") for name in stored)
    assert any("/journal/" in name for name in stored)
    assert any(name.endswith(".log.gz") for name in stored)
    leaks = [
        (source, secret)
        for source, content in chain(
            while_running.items(), printed.items(), written.items(), stored.items()
        )
        for secret in (ARGUMENT, ENVIRONMENT, STORE, head.token)
        if secret.encode() in content
    ]
    assert leaks == []
    (log_file,) = (path for path in head.output.rglob("job.log"))
    log = log_file.read_text()
    head.close()
    monkeypatch.setenv("RAY_ADDRESS", head.address)
    shutil.rmtree(log_file.parents[1])
    check_records(stored, log, f"s3://AKIA:{STORE}@bucket/runs?{options}")


def check_records(stored: dict[str, bytes], log: str, url: str) -> None:
    """The cluster and its disk are gone; the store has all of the job."""

    def rayzero(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "--path", url])
        assert done.exit_code == 0, done.output
        assert STORE not in done.output
        return done.stdout

    assert "[rank 0] " in log
    assert rayzero("logs", "secretive") == log
    status = json.loads(rayzero("status", "secretive", "--json"))
    assert (status["state"], status["faults"].get("lost")) == ("stopped", 1)
    (listed,) = json.loads(rayzero("ls", "--json"))
    assert listed == status
    events = [json.loads(line) for line in stored_events(stored)]
    kinds = [event["kind"] for event in events]
    assert (kinds[0], kinds[-1], kinds.count("repaired")) == ("begun", "ended", status["repairs"])
    saved = [event["step"] for event in events if event["kind"] == "checkpoint"]
    assert saved == [int(step) for step in re.findall(r"checkpoint of step (\d+): [0-9]", log)]
    with closing(JobsPage(url, "127.0.0.1", 0)) as page:
        with urlopen(f"{page.url}jobs.json", timeout=60) as response:
            text = response.read().decode()
        assert STORE not in text
        (row,) = json.loads(text)["jobs"]
        assert (row["state"], row["step"]) == ("stopped", status["step"])
        with urlopen(f"{page.url}jobs/secretive/history.json", timeout=60) as response:
            assert json.loads(response.read())["curves"]["loss"]


def stored_events(stored: dict[str, bytes]) -> list[str]:
    parts = sorted(name for name in stored if "/journal/" in name)
    return b"".join(stored[name] for name in parts).decode().splitlines()


def read_bucket(options: str) -> Iterator[tuple[str, bytes]]:
    """All objects, decompressed."""
    store, root = fs.FileSystem.from_uri(f"s3://k:s@bucket?{options}")
    for info in store.get_file_info(fs.FileSelector(root, recursive=True)):
        if info.is_file:
            with store.open_input_file(info.path) as file:
                content = file.readall()
            yield info.path, gzip.decompress(content) if info.path.endswith(".gz") else content


def test_failing_commands_do_not_print_secrets(
    options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing bucket and an unsupported scheme, with credentials in the URL."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    url = f"s3://AKIA:{STORE}@no-such-bucket/runs?{options}"
    unsupported = url.replace("s3:", "ftp:")
    for args in (
        ["ls", "--path", url],
        ["status", "missing", "--path", unsupported],
        ["ckpt", "ls", url],
        ["ckpt", "ls", unsupported],
    ):
        result = CliRunner().invoke(app, args)
        assert STORE not in result.output, args
        if args[0] == "ckpt":
            assert isinstance(result.exception, SystemExit)
            assert result.exit_code != 0
            assert "***" in result.output


def test_command_lines_are_readable() -> None:
    """Guards against a vacuous check for secrets on command lines."""
    lines = dict(read_command_lines())
    assert f"process {os.getpid()}" in lines

"""Secrets that a job is given in every way there is, looked for in all that it tells and writes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from pyarrow import fs

from benchmarks.ports import free_ports
from benchmarks.token_head import TokenHead, wait_for
from tests.integration.jobs.steady import ENGINE
from tests.integration.leak_sources import by_ray, command_lines, files, served
from tests.support.bucket import bucket_options

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LIMIT_S = 240.0
ARGUMENT, ENVIRONMENT, STORE = (f"pl4nted-{kind}-9f3a" for kind in ("arg", "env", "store"))


@pytest.fixture(scope="module")
def options() -> Iterator[str]:
    with bucket_options() as found:
        yield f"{found}&region=us-east-1"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenHead]:
    made = TokenHead(tmp_path_factory.mktemp("head"), cpus=3)
    made.env |= {"WANDB_API_KEY": ENVIRONMENT, "AWS_SECRET_ACCESS_KEY": ENVIRONMENT}
    try:
        made.start()
        yield made
    finally:
        made.kill()


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


def test_no_secret_is_told_or_written(head: TokenHead, options: str, tmp_path: Path):
    (port,) = free_ports(1)
    path = job_file(tmp_path / "mine", options, port)
    url = f"http://127.0.0.1:{port}"
    asked = [head.rayzero("submit", str(path))]
    assert asked[0].returncode == 0, asked[0].stderr

    def has_gone_through_it() -> bool:
        try:
            with urlopen(f"{url}/snapshot.json", timeout=20) as answer:
                told = json.loads(answer.read())
        except OSError:
            return False
        return bool(told["recoveries"] and told["checkpoints"] and told["progress"]["step"] > 60)

    wait_for(has_gone_through_it, LIMIT_S, "a repair and a checkpoint")
    while_it_runs = dict(chain(served(url), by_ray(head), command_lines()))
    assert {"/", "/metrics", "/snapshot.json"} <= while_it_runs.keys()
    other = job_file(tmp_path / "mine", options, port, api_key=ARGUMENT + "-other")
    refused = head.rayzero("submit", str(other))
    assert refused.returncode == 2
    assert "args.api_key: *** -> ***" in refused.stderr
    status = ("status", "secretive")
    questions = [("ls", "--json"), status, (*status, "--json"), ("logs", "secretive")]
    asked += [head.rayzero(*words) for words in (*questions, ("stop", "secretive"))]
    assert [one.returncode for one in asked] == [0] * len(asked), asked[-1].stderr
    assert "checkpoint of step" in asked[-2].stdout
    commands = {
        f"command {index}": (one.stdout + one.stderr).encode()
        for index, one in enumerate([*asked, refused])
    }
    written = dict(files(head.folder, head.session, head.output))
    stored = dict(in_bucket(options))
    assert any(name.endswith("manifest.json") for name in stored)
    assert any("/journal/" in name for name in stored)
    found = [
        (where, kind)
        for where, content in chain(
            while_it_runs.items(), commands.items(), written.items(), stored.items()
        )
        for kind in (ARGUMENT, ENVIRONMENT, STORE, head.token)
        if kind.encode() in content
    ]
    assert found == []


def in_bucket(options: str) -> Iterator[tuple[str, bytes]]:
    store, root = fs.FileSystem.from_uri(f"s3://k:s@bucket?{options}")
    for one in store.get_file_info(fs.FileSelector(root, recursive=True)):
        if one.is_file:
            with store.open_input_file(one.path) as file:
                yield one.path, file.readall()


def test_commands_that_fail_tell_none(head: TokenHead, options: str):
    """A bucket that is not there, credentials and all; a wrong scheme; a doctor."""
    url = f"s3://AKIA:{STORE}@no-such-bucket/runs?{options}"
    wrong = url.replace("s3:", "ftp:")
    for words in (
        ["ls", "--path", url],
        ["status", "nobody", "--path", wrong],
    ):
        done = head.rayzero(*words)
        assert STORE not in done.stdout + done.stderr, words
    for words in (["ckpt", "ls", url], ["doctor", "--checkpoint", wrong]):
        done = head.command("rayzero", *words)
        assert done.returncode != 0
        assert "***" in done.stdout + done.stderr, done
        assert STORE not in done.stdout + done.stderr, words
        assert "Traceback" not in done.stderr


def test_this_test_can_see() -> None:
    """What is on a command line or in a file is found."""
    here = dict(command_lines())
    assert any(f"process {os.getpid()}" == where for where in here)

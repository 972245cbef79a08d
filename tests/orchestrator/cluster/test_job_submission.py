"""Submission of commands to another cluster, whose dashboard shows every job's command."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cluster.job_submission import RemoteJobClient


class Client:
    """A job API that accepts every command, and returns `output` in parts of `cut` characters."""

    output, cut = "", 1

    def __init__(self, address: str) -> None:
        self.taken: list[str] = []

    def submit_job(self, entrypoint: str, runtime_env: object) -> str:
        self.taken.append(entrypoint)
        return "id"

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        for start in range(0, len(self.output), self.cut):
            yield self.output[start : start + self.cut]

    def get_job_info(self, job: str) -> SimpleNamespace:
        return SimpleNamespace(driver_exit_code=3)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> RemoteJobClient:
    monkeypatch.setattr("rayzero.orchestrator.cluster.job_submission.JobSubmissionClient", Client)
    return RemoteJobClient("http://head:8265")


@pytest.mark.parametrize(
    "word",
    [
        "args.hf_token=p4ss",
        "args.apiKey=p4ss",
        "s3://key:p4ss@bucket/runs",
        "checkpoint.path=s3://bucket/runs?secret_key=p4ss",
    ],
)
def test_secret_argument_is_rejected(cluster: RemoteJobClient, word: str):
    with pytest.raises(ConfigError, match="contains a secret") as caught:
        cluster.submit(["run", "job.yaml", "--set", word], None)
    assert "p4ss" not in str(caught.value)


def test_arguments_without_secrets_are_accepted(cluster: RemoteJobClient):
    words = ["run", "job.yaml", "--set", "args.pad_token=<pad>", "--set", "args.tokens=5"]
    assert cluster.submit(words, None) == "id"


@pytest.mark.parametrize("cut", [1, 7, 1000])
@pytest.mark.parametrize("printed", ["[]\n", "a\nRunning entrypoint for job x\n", "no end", ""])
def test_lines_are_shown_without_those_of_ray(
    cluster: RemoteJobClient, cut: int, printed: str
) -> None:
    head = (
        "2026-11-21 15:30:51,060\tINFO job_manager.py:581 -- Runtime env is setting up.\n"
        "Running entrypoint for job raysubmit_UB: python3 -m rayzero ls --json\n"
    )
    Client.output, Client.cut = head + printed, cut
    lines: list[str] = []
    assert cluster.follow("id", lines.append) == 3
    assert lines == printed.splitlines()

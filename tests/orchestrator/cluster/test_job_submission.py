"""Submission of commands to another cluster: what is uploaded, shown and kept secret."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
from ray._private.runtime_env import packaging
from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cli.app import app
from rayzero.orchestrator.cluster import command_client
from rayzero.orchestrator.cluster.connect import connect
from rayzero.orchestrator.cluster.job_submission import RemoteJobClient, select_upload


class Client:
    """A job API that accepts every command, and returns `output` in parts of `cut` characters."""

    output, cut = "", 1
    newest: Client

    def __init__(self, address: str) -> None:
        Client.newest = self
        self.taken: list[str] = []
        self.uploaded: list[set[str]] = []

    def submit_job(self, entrypoint: str, runtime_env: dict[str, Any]) -> str:
        if "working_dir" in runtime_env:  # as Ray's client does, before its request
            self.uploaded.append(upload_names(runtime_env))
            raise RuntimeError("Request failed with status code 413: Maximum request body size")
        self.taken.append(entrypoint)
        return "id"

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        for start in range(0, len(self.output), self.cut):
            yield self.output[start : start + self.cut]

    def stop_job(self, job: str) -> None:
        self.taken.append(f"stop {job}")
        raise RuntimeError("Request failed with status code 404")

    def get_job_info(self, job: str) -> SimpleNamespace:
        return SimpleNamespace(driver_exit_code=3)


def upload_names(runtime_env: dict[str, Any]) -> set[str]:
    """The files in the package that Ray makes of the working directory."""
    made: list[Path] = []

    def pack(working_dir: str, excludes: list[str], is_file: bool = False) -> None:
        target = Path(working_dir).parent / "package.zip"
        packaging.create_package(working_dir, target, include_gitignore=True, excludes=excludes)
        made.append(target)

    upload_working_dir_if_needed(dict(runtime_env), include_gitignore=True, upload_fn=pack)
    with ZipFile(made[0]) as package:
        return {name for name in package.namelist() if not name.endswith("/")}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with code and what is none."""
    monkeypatch.setenv("RAYZERO_UPLOAD_MAX_FILE_BYTES", "1000")
    files = {
        "job.yaml": 10,
        "train.py": 20,
        "journal/notes.py": 5,
        "data/__init__.py": 0,
        "data/train set #1.bin": 1001,
        "runs/first/job.json": 5,
        "runs/first/events.jsonl": 5,
        "runs/first/weights.safetensors": 9,
        "my env/pyvenv.cfg": 5,
        "my env/lib/torch.py": 5,
        ".venv/lib/torch.py": 5,
        "notes.txt": 5,
    }
    for name, size_bytes in files.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size_bytes)
    (tmp_path / "project" / ".gitignore").write_text("notes.txt\n")
    return tmp_path / "project"


def test_upload_has_code_only(
    cluster: RemoteJobClient, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "tmp").mkdir()
    (project / "tmp" / "session").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(project / "tmp"))
    upload = select_upload(project)
    names = {".gitignore", "job.yaml", "train.py", "journal/notes.py", "data/__init__.py"}
    assert set(upload.sizes) == names
    with pytest.raises(ConfigError, match=r"too large .* 5 files of .* train\.py [\s\S]*rayignore"):
        cluster.submit(["run", "job.yaml"], upload)
    assert cluster._client.uploaded == [names]  # type: ignore[attr-defined]  # Ray's own package
    data, environment, job, temporary = upload.describe()
    assert data.startswith("not uploaded, as over 0.0 MB")
    assert data.endswith("data/train set #1.bin")
    assert environment == "not uploaded, as a virtual environment: my env"
    assert temporary == "not uploaded, as temporary files: tmp"
    assert job == "not uploaded, as checkpoints and journal of a job: runs/first"


@pytest.mark.parametrize("given", ["option", "variable"])
def test_dashboard_address_runs_the_command_in_its_cluster(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rayzero.orchestrator.cluster.job_submission.JobSubmissionClient", Client)
    monkeypatch.setattr(command_client, "run_at_command_server", lambda *_: None)
    monkeypatch.setattr("rayzero.orchestrator.cluster.addresses.check_dashboard", lambda _: None)
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265" if given == "variable" else "auto")
    Client.output, Client.cut = "first: running\n", 100
    options = ["--address", "http://head:8265"] if given == "option" else []
    with pytest.raises(SystemExit) as exited:
        app(["status", "first", "--json", *options])
    assert Client.newest.taken == ["python3 -m rayzero status --json first"]
    assert (exited.value.code, capsys.readouterr().out) == (3, "first: running\n")


def test_job_in_python_refuses_a_dashboard_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    with pytest.raises(ConfigError, match="ray job submit --address http://head:8265"):
        connect(None)


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


def test_command_is_stopped_if_it_can_be(cluster: RemoteJobClient):
    cluster.stop("id")
    assert Client.newest.taken == ["stop id"]


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

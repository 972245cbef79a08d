"""`rayzero ckpt`: output and exit codes."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from rayzero.orchestrator.cli.app import app
from rayzero.orchestrator.cli.ckpt import print_progress
from tests.engine.checkpoint.saving import read_manifest, save, write_files


@pytest.fixture
def job(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step, created_s=0.0)
    write_files(str(tmp_path / "step-110"), 110)
    return tmp_path


def ckpt(*arguments: object, code: int = 0) -> str:
    """Runs the command; its stdout if it succeeds, all its output otherwise."""
    result = CliRunner().invoke(app, ["ckpt", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.stdout if code == 0 else result.output


def size_of(folder) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def flip(path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def test_ls(job):
    path = job / "step-10" / read_manifest(str(job / "step-10")).files[1].name
    path.unlink()
    heads, *rows = ckpt("ls", job).splitlines()
    assert heads.split() == ["step", "age", "size", "world", "stage"]
    assert [row.split()[0] for row in rows] == ["9", "10", "100", "110"]
    assert rows[0].endswith("2      2  whole")
    assert rows[1].endswith(f"damaged: {path.name} is missing")
    assert "unfinished: it has no manifest.json" in rows[3]
    assert rows[0].split()[2] == "d"  # of its age
    (row,) = map(json.loads, ckpt("ls", job / "step-100", "--json").splitlines())
    assert row == {
        "step": 100,
        "folder": str(job / "step-100"),
        "condition": "whole",
        "problem": "",
        "bytes": size_of(job / "step-100"),
        "world_size": 2,
        "stage": 2,
        "created_s": 0.0,
    }


def test_name_of_a_job_is_its_folder_in_runs(tmp_path, monkeypatch):
    save(tmp_path / "runs/gpt", 9, created_s=0.0)
    monkeypatch.chdir(tmp_path)
    assert ckpt("ls", "gpt") == ckpt("ls", "runs/gpt")
    assert ckpt("verify", "gpt/step-9") == "step 9: intact\n"
    assert "there are no checkpoints at other" in ckpt("ls", "other", code=2)
    assert "the name of a job in runs/" in ckpt("ls", "other", code=2)


def test_verify(job):
    text = ckpt("verify", job)
    assert "step 9: intact" in text
    assert "step 110: it has no manifest.json: its save did not end" in text
    file = read_manifest(str(job / "step-10")).files[0]
    flip(job / "step-10" / file.name, file.nbytes - 1)
    (job / "step-9" / "notes.txt").write_text("mine")
    text = ckpt("verify", job, code=1)
    assert "step 10: damaged" in text
    assert f"{file.name} is damaged between bytes " in text
    assert "notes.txt is not part of the checkpoint" in text
    assert "step 9: intact" in text
    lines = ckpt("verify", job / "step-10", "--json", code=1).splitlines()
    (problem,) = json.loads(lines[0])["problems"]
    assert (problem["file"], problem["kind"]) == (file.name, "flipped")
    ckpt("verify", job / "step-110", code=1)


def test_prune(job):
    before = ckpt("ls", job)
    text = ckpt("prune", job, "--keep", 1, "--keep-every", 10, "--dry-run")
    assert "would be removed: steps 9\n" in text
    assert "kept: steps 10, 100" in text
    assert ckpt("ls", job) == before
    assert "removed: steps 9\n" in ckpt("prune", job, "--keep", 1, "--keep-every", 10)
    assert [row.split()[0] for row in ckpt("ls", job).splitlines()[1:]] == ["10", "100", "110"]
    text = ckpt("prune", job, "--keep", 1, "--json", "--dry-run")
    fields = json.loads(text)
    assert fields.pop("bytes") == size_of(job / "step-10")
    assert fields == {"kept": [100], "removed": [10], "swept": [], "dry_run": True}
    assert "is one checkpoint" in ckpt("prune", job / "step-10", "--keep", 1, code=2)
    ckpt("prune", job, "--keep", 0, code=2)


@pytest.mark.parametrize(("path", "engine"), [("", None), ("step-100", "critic")])
def test_export_prints_files(job, monkeypatch, path, engine):
    """Of a job, the newest complete one."""
    calls = []

    class Export:
        @staticmethod
        def export_checkpoint(*arguments: str, progress, engine) -> list[str]:
            calls.append((*arguments, engine))
            progress(1)
            return ["out/model.safetensors"]

    monkeypatch.setitem(sys.modules, "rayzero.engine.checkpoint.export", Export)
    chosen = ("--engine", engine) if engine else ()
    text = ckpt("export", job / path, "--to", "out", "--format", "torch", *chosen)
    assert text == "out/model.safetensors\n"
    assert calls == [(str(job / "step-100"), "out", "torch", engine)]
    fields = json.loads(ckpt("export", job / path, "--to", "out", "--json"))
    files = ["out/model.safetensors"]
    assert fields == {"folder": str(job / "step-100"), "format": "safetensors", "files": files}


def test_progress_is_printed_as_lines_without_terminal(capsys):
    now_s = [0.0]
    add = print_progress("exporting", 4 * 2**20, clock=lambda: now_s[0])
    for now_s[0] in (0.0, 9.0, 11.0, 12.0, 21.5):
        add(2**19)
    assert capsys.readouterr().err.splitlines() == [
        "exporting: 1.5 MiB of 4 MiB read",
        "exporting: 2.5 MiB of 4 MiB read",
    ]


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["prune", "--keep", "1"]])
def test_commands_fail_without_checkpoints(tmp_path, command):
    assert "there are no checkpoints at" in ckpt(*command, tmp_path, code=2)
    (tmp_path / "file").write_text("")
    assert "Not a directory" in ckpt(*command, tmp_path / "file", code=1)

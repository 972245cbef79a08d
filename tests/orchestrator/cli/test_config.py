"""`rayzero config`: output and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rayzero.orchestrator.cli.app import app

ENGINE = {"train_batch_size": 8, "bfloat16": True, "optimizer": {"type": "adamw"}}


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(ENGINE))
    return path


def config(*arguments: object, code: int = 0) -> str:
    """Runs the command; its stdout if it succeeds, all its output otherwise."""
    result = CliRunner().invoke(app, ["config", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.stdout if code == 0 else result.output


def test_explain_groups_keys_in_effect(engine: Path) -> None:
    lines = [line.rstrip() for line in config("explain", engine).splitlines()]
    assert lines[0] == "batch sizes"
    cells = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert "  train_batch_size = 8  (file): samples per step, over all ranks" in lines
    assert " ".join(cells["bf16.enabled"][:5]) == "= true (old name bfloat16):"
    assert cells["zero_optimization.stage"][:3] == ["=", "0", "(default):"]
    assert "zero_optimization.contiguous_gradients" not in cells
    text = config("explain", engine, "--all")
    assert "zero_optimization.contiguous_gradients" in text
    assert "no-op: always so" in text
    assert "elasticity" in text


def test_explain_as_json(engine: Path) -> None:
    infos = [json.loads(line) for line in config("explain", engine, "--json").splitlines()]
    first = next(info for info in infos if info["key"] == "train_batch_size")
    assert first == {
        "group": "batch sizes",
        "key": "train_batch_size",
        "status": "implemented",
        "value": 8,
        "source": "file",
        "in_force": True,
        "what": "samples per step, over all ranks",
        "reason": "",
    }


def test_job_file_is_explained_by_its_engine_config(engine: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: j\nentrypoint: m:f\nsteps: 70\n"
        "engine:\n  scheduler: {type: WarmupDecayLR, params: {total_num_steps: auto}}\n"
        "  optimizer: {type: SGD}\n"
    )
    infos = [json.loads(line) for line in config("explain", job, "--json").splitlines()]
    values = {info["key"]: info["value"] for info in infos}
    assert values["scheduler.params.total_num_steps"] == 70
    job.write_text("name: j\nentrypoint: m:f\nengine: engine.json\n")
    assert "old name bfloat16" in config("explain", job)
    job.write_text("name: j\nentrypoint: m:f\n")
    assert "has no engine config" in config("explain", job, code=2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON or Hjson"),
        ('{"a":' * 3000 + "1" + "}" * 3000, "nested too deeply"),
        ('{"train_batch_size": 1e999}', "train_batch_size: input should be a valid integer"),
    ],
)
def test_invalid_file_ends_with_code_2(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(content)
    text = config("explain", path, code=2)
    assert text.startswith("error: engine config")
    assert message in text


@pytest.mark.parametrize("command", [("config", "explain"), ("run",), ("submit",)])
def test_hostile_job_file_ends_with_code_2(command: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: j\nentrypoint: m:f\nseed: !!float x\nargs: &a [*a]\n")
    result = CliRunner().invoke(app, [*command, str(path)])
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert "line 3, column 7: the tag" in result.output


def test_schema() -> None:
    schema = json.loads(config("schema"))
    assert schema["title"] == "rayzero engine config"
    assert "train_batch_size" in schema["properties"]

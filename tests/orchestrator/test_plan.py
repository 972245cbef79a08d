"""What is worked out before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.plan import JobPlan, make_plan
from rayzero.orchestrator.spec import JobSpec


def planned(**checkpoint: Any) -> JobPlan:
    spec = JobSpec(name="job", entrypoint="m:f", checkpoint=checkpoint)  # type: ignore[arg-type]
    return make_plan(spec, "m:f")


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ray's copy of a working directory, as the current one."""
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123abcd"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def test_checkpoints_do_not_go_where_ray_removes_them(copy: Path, tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        planned(path="runs", every_steps=10)
    assert "checkpoint.path is 'runs', which is in Ray's copy" in str(refused.value)
    assert "--set checkpoint.path=" in str(refused.value)
    assert not (copy / "runs").exists()
    assert not planned(path=str(tmp_path / "runs"), every_steps=10).output_is_temporary
    assert not planned(path="s3://bucket/runs", every_steps=10).job_folder.startswith(str(copy))
    # Where nothing is to be gone on with, it is only told.
    assert planned(path="runs").output_is_temporary


def test_a_relative_path_elsewhere_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    made = planned(path="runs", every_steps=10)
    assert made.output_dir == tmp_path / "runs" / "job"
    assert not made.output_is_temporary

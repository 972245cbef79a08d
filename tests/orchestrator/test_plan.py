"""Checks of a job's folders before the job starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.plan import JobPlan, make_plan
from rayzero.orchestrator.spec import CheckpointSpec, JobSpec


def planned(**checkpoint: Any) -> JobPlan:
    spec = JobSpec(name="job", entrypoint="m:f", checkpoint=checkpoint)  # type: ignore[arg-type]
    return make_plan(spec, "m:f")


@pytest.fixture
def ray_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ray's copy of a working directory, as the current directory."""
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123abcd"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def test_checkpoint_folder_in_ray_working_directory_is_rejected(ray_copy: Path, tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        planned(path="runs", every_steps=10)
    assert "checkpoint.path is 'runs', which is in Ray's copy" in str(error.value)
    assert "--set checkpoint.path=" in str(error.value)
    assert not (ray_copy / "runs").exists()
    assert not planned(path=str(tmp_path / "runs"), every_steps=10).output_is_temporary
    assert not planned(path="s3://bucket/runs", every_steps=10).job_folder.startswith(str(ray_copy))
    # Without checkpoints it is only a warning.
    assert planned(path="runs").output_is_temporary


def test_threads_of_an_optimizer_beside_gpus_follow_from_the_node(tmp_path: Path):
    """Unless the job file says how many; the reservation stays one CPU."""

    def threads(workers: dict[str, Any], device: str) -> tuple[int, float]:
        engine = {
            "train_batch_size": 1,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": device, "nvme_path": str(tmp_path)},
            },
        }
        spec = JobSpec(name="job", entrypoint="m:f", workers=workers, engine=engine)  # type: ignore[arg-type]
        spec = spec.model_copy(update={"checkpoint": CheckpointSpec(path=str(tmp_path))})
        plan = make_plan(spec, "m:f")
        assert plan.worker_spec.cpus == plan.resources.cpus
        return plan.resources.threads, plan.resources.cpus

    assert threads({"gpus": 1}, "cpu") == (0, 1)
    assert threads({"gpus": 1, "cpus": 4}, "nvme") == (4, 4)
    assert threads({"gpus": 1}, "none") == (1, 1)
    assert threads({"gpus": 0, "cpus": 0.5}, "cpu") == (1, 0.5)


def test_relative_checkpoint_path_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    plan = planned(path="runs", every_steps=10)
    assert plan.output_dir == tmp_path / "runs" / "job"
    assert not plan.output_is_temporary

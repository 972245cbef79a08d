"""The chart's job as an arbitrary user without capabilities on a read-only root file system.

Everything but Kubernetes is real: the config map's job file, the head's environment, Ray, training.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.chart import container_of, job_files, render_scenario
from tests.house.source import ROOT

UID = 12345
SMALL_JOB = {
    "args": {"layers": 1, "width": 32, "heads": 2, "context": 32},
    "workers.min": 1,
    "workers.max": 1,
    "steps": 2,
    "checkpoint.path": "/checkpoints/runs",
}


def run_in_container(
    folder: Path, environment: dict[str, str], *command: str, timeout_s: int
) -> str:
    """Run a command in a container that has this machine's programs, and return its output."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "ip"))):
        pytest.skip("needs root, unshare, setpriv and ip")
    root = folder / "root"
    root.mkdir()
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--ipc", "--net"]
    if subprocess.run([*namespaces, "mount", "-t", "tmpfs", "tmpfs", str(root)]).returncode:
        pytest.skip("needs permission to mount")
    paths = {"/usr", "/bin", "/lib", "/lib64", "/etc", sys.base_prefix, sys.prefix, str(ROOT)}
    container = ["bash", str(ROOT / "tests/deploy/container.sh"), str(root), str(UID)]
    mounts = [*sorted(path for path in paths if Path(path).exists()), str(folder / "job"), "--"]
    variables = [f"{name}={value}" for name, value in environment.items()]
    done = subprocess.run(
        [*namespaces, *container, *mounts, *variables, *command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_job_runs_unprivileged_on_read_only_root(tmp_path: Path) -> None:
    objects = render_scenario("cpu-dev")
    (tmp_path / "job").mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    job_files(objects, tmp_path / "job")
    head = container_of(objects, "head")
    environment = {variable["name"]: variable["value"] for variable in head["env"]} | {
        "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HOME": "/",
        "RAY_AUTH_MODE": "disabled",
    }
    overrides = [f"--set={key}={json.dumps(value)}" for key, value in SMALL_JOB.items()]
    command = (
        f"python -m rayzero run {tmp_path}/job/job.yaml --json {' '.join(map(repr, overrides))}"
    )
    output = run_in_container(
        tmp_path,
        environment,
        *("sh", "-c"),
        "id -u; ! touch /file 2>&1; grep CapEff /proc/self/status; "
        "! touch $HOME/file 2>&1; python -m rayzero doctor --checkpoint /checkpoints/runs --json; "
        f"{command}; ls /checkpoints/runs/*",
        timeout_s=540,
    )
    lines = output.splitlines()
    assert lines[0] == str(UID)
    assert "Read-only" in lines[1]
    assert lines[2].split() == ["CapEff:", "0" * 16]
    assert "Read-only" in lines[3], "no home directory is needed"
    (report,) = [json.loads(line) for line in lines if '"findings"' in line]
    assert report["level"] != "fail", report
    levels = {finding["name"]: finding["level"] for finding in report["findings"]}
    assert levels["gloo"] == "ok", "two processes can communicate"
    (summary,) = [json.loads(line) for line in lines if '"event": "summary"' in line]
    assert summary["steps"] == SMALL_JOB["steps"]
    assert {"summary.json", f"step-{SMALL_JOB['steps']}"} <= set(lines)

"""The chart's job, run as its containers run it: any user, no capabilities, a read-only root.

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

from tests.deploy.chart import of_kind, pod_of, rendered
from tests.house.source import ROOT

UID = 12345
SMALL = {
    "args": {"layers": 1, "width": 32, "heads": 2, "context": 32},
    "steps": 2,
    "checkpoint.path": "/checkpoints/runs",
}


def contained(folder: Path, environment: dict[str, str], *command: str, limit_s: int) -> str:
    """The output of a command in a container of this machine's own programs."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "ip"))):
        pytest.skip("needs root, unshare, setpriv and ip")
    root = folder / "root"
    root.mkdir()
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--ipc", "--net"]
    if subprocess.run([*namespaces, "mount", "-t", "tmpfs", "tmpfs", str(root)]).returncode:
        pytest.skip("needs the right to mount")
    paths = {"/usr", "/bin", "/lib", "/lib64", "/etc", sys.base_prefix, sys.prefix, str(ROOT)}
    box = ["bash", str(ROOT / "tests/deploy/container.sh"), str(root), str(UID)]
    inside = [*sorted(path for path in paths if Path(path).exists()), str(folder / "job"), "--"]
    values = [f"{name}={value}" for name, value in environment.items()]
    done = subprocess.run(
        [*namespaces, *box, *inside, *values, *command],
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_charts_job_runs_as_its_containers_do(tmp_path: Path) -> None:
    (data,) = [
        one["data"]
        for one in of_kind(rendered("cpu-dev"), "ConfigMap")
        if "job.yaml" in one["data"]
    ]
    (tmp_path / "job").mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    for name, text in data.items():
        (tmp_path / "job" / name).write_text(text, encoding="utf-8")
    (head,) = pod_of(rendered("cpu-dev"), "head")["spec"]["containers"]
    environment = {one["name"]: one["value"] for one in head["env"]} | {
        "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HOME": "/",
        "RAY_AUTH_MODE": "disabled",
    }
    overrides = [f"--set={key}={json.dumps(value)}" for key, value in SMALL.items()]
    command = (
        f"python -m rayzero run {tmp_path}/job/job.yaml --json {' '.join(map(repr, overrides))}"
    )
    said = contained(
        tmp_path,
        environment,
        *("sh", "-c"),
        "id -u; ! touch /file 2>&1; grep CapEff /proc/self/status; "
        "! touch $HOME/file 2>&1; python -m rayzero doctor --checkpoint /checkpoints/runs --json; "
        f"{command}; ls /checkpoints/runs/*",
        limit_s=540,
    )
    lines = said.splitlines()
    assert lines[0] == str(UID)
    assert "Read-only" in lines[1]
    assert lines[2].split() == ["CapEff:", "0" * 16]
    assert "Read-only" in lines[3], "no home is needed"
    (told,) = [json.loads(line) for line in lines if '"findings"' in line]
    assert told["level"] != "fail", told
    (summary,) = [json.loads(line) for line in lines if '"event": "summary"' in line]
    assert summary["steps"] == SMALL["steps"]
    assert {"summary.json", f"step-{SMALL['steps']}"} <= set(lines)

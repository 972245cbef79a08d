"""The image, without Docker: what it copies is there, and its install steps run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.chart import rendered
from tests.deploy.dockerfile import Step, arguments, context, copied, steps
from tests.house.source import ROOT

STEPS = steps(ROOT / "Dockerfile")
INSTALL_STAGES = ("base", "torch-cpu", "build")
CONTEXT_BYTES = 5 * 2**20


def of(word: str, stage: str = "runtime") -> list[str]:
    return [step.rest for step in STEPS if (step.stage, step.word) == (stage, word)]


def test_bases_and_stages_are_named_exactly() -> None:
    defaults = arguments(STEPS)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-bookworm", defaults["PYTHON_IMAGE"])
    stages = [step.stage for step in STEPS if step.word == "FROM"]
    for step in STEPS:
        if step.word == "FROM":
            base = step.rest.partition(" AS ")[0]
            assert base in {"${PYTHON_IMAGE}", "torch-${VARIANT}", *stages}
    assert {f"torch-{variant}" for variant in ("cpu", "cuda")} <= set(stages)
    assert f"torch-{defaults['VARIANT']}" in stages


def test_what_is_copied_is_there_and_in_the_context() -> None:
    files = set(context(ROOT))
    for name in copied(STEPS):
        path = ROOT / name
        assert path.exists(), name
        assert any(file == path or path in file.parents for file in files), f"{name} is ignored"


def test_the_context_is_small() -> None:
    files = list(context(ROOT))
    tops = {file.relative_to(ROOT).parts[0] for file in files}
    assert tops <= {name.partition("/")[0] for name in copied(STEPS)}
    assert not [file for file in files if "__pycache__" in file.parts]
    assert sum(file.stat().st_size for file in files) < CONTEXT_BYTES


def test_it_runs_as_anybody_but_root() -> None:
    (user,) = of("USER")
    uid, _, gid = user.partition(":")
    assert int(uid) > 0
    assert gid == "0", "an arbitrary uid has group 0"
    (made,) = [line for line in of("RUN") if "useradd" in line]
    (folder,) = of("WORKDIR")
    assert f"--uid {uid} --gid 0" in made
    assert re.search(rf"chmod -R g=u .*{folder}\b", made)


def test_the_chart_finds_what_it_needs() -> None:
    """The folder it mounts over, the port it names, the command that KubeRay's probes run."""
    (job,) = [one for one in rendered("default") if one["kind"] == "RayJob"]
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert of("WORKDIR") == [head["workingDir"]]
    (ports,) = of("EXPOSE")
    named = {port["containerPort"] for port in head["ports"]} - {8080}
    assert named == set(map(int, ports.split()))
    (packages,) = [line for line in of("RUN") if "apt-get" in line]
    assert "wget" in packages.split()
    (entry,) = {job["spec"]["entrypoint"].split()[0]}
    assert entry in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def test_it_says_whether_it_is_healthy() -> None:
    (check,) = of("HEALTHCHECK")
    command = shlex.split(check.partition("CMD ")[2].strip("[]").replace(",", " "))
    program = Path(sys.executable).with_name(command[0])
    known = subprocess.run([program, *command[1:], "--help"], capture_output=True, timeout=300)
    assert known.returncode == 0


def test_all_that_is_installed_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {re.split(r"[\[<>=!~ ]", line)[0].lower() for line in project["dependencies"]}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    assert wanted - pinned == set()
    for step in STEPS:
        if step.word == "RUN" and "pip install" in step.rest:
            assert "--constraint constraints.txt" in step.rest


@pytest.mark.slow
def test_its_install_steps_run(tmp_path: Path) -> None:
    """Every RUN of the stages that make the virtual environment, in a copy of the context.

    torch is resolved and not fetched, from whatever index this environment has; rayzero goes in
    without its dependencies, which the pins above cover.
    """
    source, environment = tmp_path / "src", tmp_path / "venv"
    for step in STEPS:
        if step.stage not in INSTALL_STAGES:
            continue
        if step.word == "COPY":
            copy(step, source)
        if step.word == "RUN":
            run(outside_docker(step.rest, environment), source)
    found = run(f"{environment}/bin/pip show --files rayzero", source)
    assert "bin/rayzero" in found
    assert "rayzero/orchestrator/machine.py" in found
    assert "rayzero/engine/engine.py" in found


def outside_docker(command: str, environment: Path) -> str:
    command = command.replace("/opt/rayzero", str(environment))
    command = re.sub(r"--index-url \S+ ", "", command)
    command = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", command)
    if command.endswith(" torch"):
        return f"{command} --dry-run --no-deps"
    return f"{command} --no-deps" if "pip install" in command else command


def copy(step: Step, folder: Path) -> None:
    *names, _ = step.rest.split()
    folder.mkdir(exist_ok=True)
    for name in names:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder)


def run(command: str, folder: Path) -> str:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=clean, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout

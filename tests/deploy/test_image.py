"""The image, without Docker: the build context and the install steps of the Dockerfile."""

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

from tests.deploy.chart import objects_of_kind, render_scenario
from tests.deploy.dockerfile import (
    Instruction,
    build_args,
    context_files,
    copied_paths,
    parse_dockerfile,
)
from tests.house.source import ROOT

INSTRUCTIONS = parse_dockerfile(ROOT / "Dockerfile")
INSTALL_STAGES = ("base", "torch-cpu", "build")
MAX_CONTEXT_BYTES = 5 * 2**20


def arguments_of(keyword: str, stage: str = "runtime") -> list[str]:
    return [
        instruction.arguments
        for instruction in INSTRUCTIONS
        if (instruction.stage, instruction.keyword) == (stage, keyword)
    ]


def test_base_images_are_pinned_and_stages_exist() -> None:
    defaults = build_args(INSTRUCTIONS)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-bookworm", defaults["PYTHON_IMAGE"])
    from_lines = [line for line in INSTRUCTIONS if line.keyword == "FROM"]
    stages = [line.stage for line in from_lines]
    for line in from_lines:
        base = line.arguments.partition(" AS ")[0]
        assert base in {"${PYTHON_IMAGE}", "torch-${VARIANT}", *stages}
    assert {f"torch-{variant}" for variant in ("cpu", "cuda")} <= set(stages)
    assert f"torch-{defaults['VARIANT']}" in stages


def test_copied_paths_are_in_build_context() -> None:
    files = set(context_files(ROOT))
    for name in copied_paths(INSTRUCTIONS):
        path = ROOT / name
        assert path.exists(), name
        assert any(file == path or path in file.parents for file in files), f"{name} is ignored"


def test_build_context_is_small() -> None:
    files = list(context_files(ROOT))
    top_level = {file.relative_to(ROOT).parts[0] for file in files}
    assert top_level <= {name.partition("/")[0] for name in copied_paths(INSTRUCTIONS)}
    assert not [file for file in files if "__pycache__" in file.parts]
    assert sum(file.stat().st_size for file in files) < MAX_CONTEXT_BYTES


def test_image_runs_as_arbitrary_non_root_uid() -> None:
    (user,) = arguments_of("USER")
    uid, _, gid = user.partition(":")
    assert int(uid) > 0
    assert gid == "0", "an arbitrary uid has group 0"
    (command,) = [line for line in arguments_of("RUN") if "useradd" in line]
    (folder,) = arguments_of("WORKDIR")
    assert f"--uid {uid} --gid 0" in command
    assert re.search(rf"chmod -R g=u .*{folder}\b", command)


def test_image_provides_what_chart_uses() -> None:
    """The working directory, the ports, wget for KubeRay's probes, and the entry point."""
    (job,) = objects_of_kind(render_scenario("default"), "RayJob")
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert arguments_of("WORKDIR") == [head["workingDir"]]
    (ports,) = arguments_of("EXPOSE")
    chart_ports = {port["containerPort"] for port in head["ports"]} - {8080}
    assert chart_ports == set(map(int, ports.split()))
    (packages,) = [line for line in arguments_of("RUN") if "apt-get" in line]
    assert "wget" in packages.split()
    (entry,) = {job["spec"]["entrypoint"].split()[0]}
    assert entry in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def test_health_check_command_exists() -> None:
    (check,) = arguments_of("HEALTHCHECK")
    command = shlex.split(check.partition("CMD ")[2].strip("[]").replace(",", " "))
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run([program, *command[1:], "--help"], capture_output=True, timeout=300)
    assert done.returncode == 0


def test_dependencies_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {re.split(r"[\[<>=!~ ]", line)[0].lower() for line in project["dependencies"]}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    assert required - pinned == set()
    for instruction in INSTRUCTIONS:
        if instruction.keyword == "RUN" and "pip install" in instruction.arguments:
            assert "--constraint constraints.txt" in instruction.arguments


@pytest.mark.slow
def test_install_steps_run(tmp_path: Path) -> None:
    """Run every RUN of the stages that make the virtual environment, in a copy of the context.

    torch is resolved from this environment's index but not downloaded. rayzero is installed
    without its dependencies, whose pins are tested above.
    """
    source, environment = tmp_path / "src", tmp_path / "venv"
    for instruction in INSTRUCTIONS:
        if instruction.stage not in INSTALL_STAGES:
            continue
        if instruction.keyword == "COPY":
            copy(instruction, source)
        if instruction.keyword == "RUN":
            run(command_outside_docker(instruction.arguments, environment), source)
    assert (environment / "bin/rayzero").exists()
    (packages,) = environment.glob("lib/python3*/site-packages")
    assert (packages / "rayzero/orchestrator/machine.py").exists()
    assert (packages / "rayzero/engine/engine.py").exists()


def command_outside_docker(command: str, environment: Path) -> str:
    command = command.replace("/opt/rayzero", str(environment))
    command = re.sub(r"--index-url \S+ ", "", command)
    command = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", command)
    if command.endswith(" torch"):
        return f"{command} --dry-run --no-deps"
    return f"{command} --no-deps" if "pip install" in command else command


def copy(instruction: Instruction, folder: Path) -> None:
    *names, _ = instruction.arguments.split()
    folder.mkdir(exist_ok=True)
    for name in names:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder)


def run(command: str, folder: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env["PIP_NO_COMPILE"] = "1"  # bytecode, which the test does not need, takes seconds
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

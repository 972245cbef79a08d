"""The image, without Docker: the build context and the install steps of the Dockerfile."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

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
INSTALL_STAGES = ("base", "torch", "build")
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
        assert base in {"${PYTHON_IMAGE}", *stages}
    assert defaults["TORCH_INDEX"] == "https://download.pytorch.org/whl/cpu"
    assert set(INSTALL_STAGES) < set(stages)


def test_build_context_has_what_is_copied_and_little_else() -> None:
    files, copied = list(context_files(ROOT)), copied_paths(INSTRUCTIONS)
    for name in copied:
        path = ROOT / name
        assert path.exists(), name
        assert any(file == path or path in file.parents for file in files), f"{name} is ignored"
    top_level = {file.relative_to(ROOT).parts[0] for file in files}
    assert top_level <= {name.partition("/")[0] for name in copied}
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
    assert {"wget", "rdma-core", "libibverbs1", "ibverbs-providers"} <= set(packages.split())
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert job["spec"]["entrypoint"].split()[0] in scripts
    (check,) = arguments_of("HEALTHCHECK")
    program, *words = shlex.split(check.partition("CMD ")[2].strip("[]").replace(",", " "))
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *words, "--help"],
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0


def test_dependencies_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {re.split(r"[\[<>=!~ ]", line)[0].lower() for line in project["dependencies"]}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    assert required - pinned == set()
    for instruction in INSTRUCTIONS:
        if instruction.keyword == "RUN" and "pip install" in instruction.arguments:
            pins = ("--constraint constraints.txt", "$(grep ^torch== constraints.txt)")
            assert any(pin in instruction.arguments for pin in pins)


def test_release_workflow_is_valid_and_uses_what_is_here() -> None:
    """It fits GitHub's schema, its make targets exist, and its check of the tag accepts this
    version only."""
    path = ROOT / ".github/workflows/release.yaml"
    schema = ["check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([sys.executable, "-m", *schema, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    text = path.read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in commands:
        for target in re.findall(r"^make (\w+)", command, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    variants = [item["variant"] for item in jobs["image"]["strategy"]["matrix"]["include"]]
    assert build_args(INSTRUCTIONS)["VARIANT"] in variants
    (check,) = [command for command in commands if "${TAG#v}" in command]
    version = yaml.safe_load((ROOT / "helm/rayzero/Chart.yaml").read_text())["version"]
    for tag, accepted in ((f"v{version}", True), ("v99.0.0", False)):
        done = subprocess.run(["bash", "-ec", check], cwd=ROOT, env=os.environ | {"TAG": tag})
        assert (done.returncode == 0) is accepted
    assert all("timeout-minutes" in job for job in jobs.values())


@pytest.mark.slow
def test_install_steps_run(tmp_path: Path) -> None:
    """Every RUN of the stages that make the virtual environment, as it is in the Dockerfile.

    Each has the build arguments, the ENV and the files that it has in a build, on this machine's
    system. Where torch's index is out of reach, pip's own stands in for it by the build argument.
    """
    folders = {"/opt/rayzero": tmp_path / "venv", "/src": tmp_path / "src"}
    for folder in folders.values():
        folder.mkdir()
    variables = build_args(INSTRUCTIONS)
    if not is_reachable(variables["TORCH_INDEX"]):
        variables["TORCH_INDEX"] = "https://pypi.org/simple"
    del variables["PIP_INDEX_URL"]  # this machine's own
    for instruction in INSTRUCTIONS:
        if instruction.stage not in INSTALL_STAGES:
            continue
        if instruction.keyword == "ENV":
            variables |= dict(item.split("=", 1) for item in shlex.split(instruction.arguments))
        if instruction.keyword == "COPY":
            copy(instruction, folders["/src"])
        if instruction.keyword == "RUN":
            run_in_build(instruction.arguments, tmp_path / "root", folders, variables)
    modules = "torch, rayzero.engine.engine, rayzero.orchestrator.machine"
    check = f"import {modules}; print(torch.__version__)"
    version = run_in_build(
        f'/opt/rayzero/bin/python -c "{check}"', tmp_path / "root", folders, variables
    )
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"torch=={version.partition('+')[0].strip()}" in pins
    frozen = run_in_build("/opt/rayzero/bin/pip freeze", tmp_path / "root", folders, variables)
    installed = {line.partition("+")[0].lower() for line in frozen.splitlines() if "==" in line}
    unpinned = {line for line in installed if not line.startswith(("nvidia-", "triton=="))}
    assert unpinned - {line.lower() for line in pins} == set()


def is_reachable(url: str) -> bool:
    try:
        socket.getaddrinfo(urlsplit(url).hostname, 443)
    except OSError:
        return False
    return True


def copy(instruction: Instruction, folder: Path) -> None:
    *names, _ = instruction.arguments.split()
    folder.mkdir(exist_ok=True)
    for name in names:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder)


def run_in_build(
    command: str, root: Path, folders: dict[str, Path], variables: dict[str, str]
) -> str:
    """The output of a command that is run as RUN does it, with `folders` in their places."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    root.mkdir(exist_ok=True)
    namespace = ["unshare", "--mount", "--propagation", "private"]
    if subprocess.run([*namespace, "mount", "-t", "tmpfs", "tmpfs", str(root)]).returncode:
        pytest.skip("needs permission to mount")
    mounts = [text for place, folder in folders.items() for text in (place, str(folder))]
    script = ROOT / "tests/deploy/build.sh"
    ignored = ("PYTHONPATH", "VIRTUAL_ENV")
    env = {key: value for key, value in os.environ.items() if key not in ignored} | variables
    env["PATH"] = f"{sys.base_prefix}/bin:{env['PATH']}"
    env["PIP_NO_COMPILE"] = "0"  # pip inverts it: no bytecode, which takes half the time
    done = subprocess.run(
        [*namespace, "sh", str(script), str(root), *mounts, "--", command],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout

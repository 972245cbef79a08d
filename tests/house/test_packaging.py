"""Wheel and sdist contain every module of rayzero once, and both work when installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.house.source import PACKAGES, ROOT, packages

pytestmark = pytest.mark.slow

SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "rayzero", *PACKAGES)
HELP_WORDS = ("Usage", "run")


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist, built from a copy: a build writes into its source."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, source)
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out))
    run(*build, "--wheel", "--sdist", str(source), cwd=source)
    return out


@pytest.fixture(params=["whl", "tar.gz"])
def archive(request: pytest.FixtureRequest, built: Path) -> Path:
    (path,) = built.glob(f"*.{request.param}")
    return path


def members(archive: Path) -> list[str]:
    """Paths of the files in an archive, without the top folder of an sdist."""
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).namelist()
    with tarfile.open(archive) as tar:
        return [member.name.split("/", 1)[1] for member in tar.getmembers() if member.isfile()]


def test_archive_contains_every_module_once(archive: Path) -> None:
    files = members(archive)
    expected = {module.name.replace(".", "/") for module in packages()}
    modules = [file.removesuffix(".py").removesuffix("/__init__") for file in files]
    assert {name: modules.count(name) for name in expected} == dict.fromkeys(expected, 1)
    data = ["py.typed", "deepspeed/names.toml", "engine/config/inert.toml"]
    assert [files.count(f"rayzero/{name}") for name in data] == [1, 1, 1]
    assert [file for file in files if file.split("/")[0] in (*PACKAGES, "tests")] == []


def test_archive_installs_and_works(archive: Path, tmp_path: Path) -> None:
    """Installed into a separate folder, with the dependencies of this environment."""
    target = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--target", str(target), str(archive), cwd=tmp_path)
    path = {"PYTHONPATH": str(target)}  # before site-packages, where the checkout is installed
    script = "import rayzero.engine.errors as e; print(e.__file__, rayzero.RayzeroError.__module__)"
    file, module = run(
        sys.executable, "-c", "import rayzero;" + script, cwd=tmp_path, **path
    ).split()
    assert Path(file).is_relative_to(target)
    assert module == "rayzero.engine.errors"
    for command in ((sys.executable, "-m", "rayzero"), (str(target / "bin/rayzero"),)):
        output = run(*command, "--help", cwd=tmp_path, **path)
        assert all(word in output for word in HELP_WORDS)

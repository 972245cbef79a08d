"""What is shipped: wheel and sdist hold the whole of rayzero once, and both work when installed."""

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
HELP = ("Usage", "run")


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
    """A folder with a wheel and an sdist, built from a copy: a build litters its source."""
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
    """The files of an archive; the sdist's without its top folder."""
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).namelist()
    with tarfile.open(archive) as tar:
        return [one.name.split("/", 1)[1] for one in tar.getmembers() if one.isfile()]


def test_every_module_is_in_it_once(archive: Path) -> None:
    found = members(archive)
    wanted = {name.replace(".", "/") for name in (module.name for module in packages())}
    modules = [one.removesuffix(".py").removesuffix("/__init__") for one in found]
    assert {name: modules.count(name) for name in wanted} == dict.fromkeys(wanted, 1)
    assert found.count("rayzero/py.typed") == 1
    assert [one for one in found if one.split("/")[0] in (*PACKAGES, "tests")] == []


def test_it_installs_and_works(archive: Path, tmp_path: Path) -> None:
    """From a folder of its own, its dependencies coming from this environment."""
    target = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--target", str(target), str(archive), cwd=tmp_path)
    path = {"PYTHONPATH": str(target)}  # before site-packages, where the checkout is installed
    script = "import rayzero.engine.errors as e; print(e.__file__, rayzero.RayzeroError.__module__)"
    home, module = run(
        sys.executable, "-c", "import rayzero;" + script, cwd=tmp_path, **path
    ).split()
    assert Path(home).is_relative_to(target)
    assert module == "rayzero.engine.errors"
    for command in ((sys.executable, "-m", "rayzero"), (str(target / "bin/rayzero"),)):
        shown = run(*command, "--help", cwd=tmp_path, **path)
        assert all(word in shown for word in HELP)

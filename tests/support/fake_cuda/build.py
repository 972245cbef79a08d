"""Compiles the guard against this Python's torch, and runs a module with it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

from tests.support.virtual_device.memory import ROOT

_SOURCE = Path(__file__).with_name("guard.cpp")
_BUILD_LIMIT_S = 600.0  # 2 s on an idle machine


def compiler() -> str | None:
    """A C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


@cache
def build() -> Path:
    """The shared library; compiled once for each torch and source. Needs a compiler."""
    identity = f"{torch.__version__} {torch.__file__} {_SOURCE.read_text()}"
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    # A cache: no prefix of tests.support.leftovers, which would report it as leaked.
    library = Path(tempfile.gettempdir()) / f"fake-cuda-{os.getuid()}" / f"{name}.so"
    if library.exists():
        return library
    library.parent.mkdir(mode=0o700, exist_ok=True)
    partial = library.with_suffix(f".{os.getpid()}")
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    flags = ["-std=c++20", "-O0", "-w", "-shared", "-fPIC", abi]
    command = [str(compiler()), *flags, *includes, str(_SOURCE), *libraries]
    subprocess.run(
        [*command, "-lc10", "-ltorch_cpu", "-o", str(partial)], check=True, timeout=_BUILD_LIMIT_S
    )
    partial.replace(library)
    return library


def run_module(module: str, argument: Any, limit_s: float = 600.0) -> Any:
    """Runs `python -m module` with a JSON argument, in a process with the device; its last line of
    output is JSON."""
    torch_libraries = str(Path(torch.__file__).parent / "lib")
    environment = os.environ | {
        "LD_PRELOAD": str(build()),
        "LD_LIBRARY_PATH": torch_libraries,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    ran = subprocess.run(
        [sys.executable, "-m", module, json.dumps(argument)],
        env=environment,
        cwd=ROOT,
        timeout=limit_s,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"{module} failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
    return json.loads(ran.stdout.splitlines()[-1])

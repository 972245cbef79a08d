"""Detects what a test run leaks: processes, temporary files and shared-memory files.

Each run has its own temporary folder, and every process that it starts inherits an environment
variable, so concurrent runs on the same machine are not confused. PYTEST_CURRENT_TEST attributes a
process to a test; files are attributed by listing the folder after each test.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path

import psutil

RUN_ENV = "RAYZERO_TEST_RUN"
EXIT_TIMEOUT_S = 60.0
"""Time for terminated processes to exit."""
_SHARED_MEMORY = Path("/dev/shm")
# Python's helper processes exit together with the process that owns them.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# Ray, torch and the standard library leave other files; they are removed with the run's folder.
_FILE_PREFIXES = ("rayzero", "rz")


class Run:
    """A test run and its temporary folder, both owned by the first process of the run."""

    def __init__(self) -> None:
        self.is_first = RUN_ENV not in os.environ
        if self.is_first:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
            # Short, because it holds Unix sockets, whose paths are limited to 107 characters.
            os.environ[RUN_ENV] = tempfile.mkdtemp(prefix="rz-", dir="/tmp")
        self.folder = Path(os.environ[RUN_ENV])
        os.environ["TMPDIR"] = str(self.folder)
        # One per xdist worker: Ray stores the address of the "auto" cluster there.
        ray_folder = self.folder / os.environ.get("PYTEST_XDIST_WORKER", "")
        ray_folder.mkdir(exist_ok=True)
        os.environ["RAY_TMPDIR"] = str(ray_folder)
        tempfile.tempdir = str(self.folder)
        self._initial_shared = set(_list_names(_SHARED_MEMORY))
        self.first_seen: dict[str, str] = {}

    def record_files(self, test: str) -> None:
        """Attribute new files in the run's folder to `test`."""
        for name in _list_names(self.folder):
            self.first_seen.setdefault(name, test)

    def clean_up(self) -> list[str]:
        """Kill leaked processes and remove leaked files. Returns one line per leak."""
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while (leaked := self._find_processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        lines = [f"process {p.pid}, {_test_of(p)}: {_command_line(p)}" for p in leaked]
        for process in leaked:
            process.kill()
        psutil.wait_procs(leaked, timeout=5)
        files = [name for name in _list_names(self.folder) if name.startswith(_FILE_PREFIXES)]
        lines += [f"{self.folder / name}, {self.first_seen.get(name, '?')}" for name in files]
        lines += [f"{_SHARED_MEMORY / name}" for name in self._wait_for_shared_files()]
        # After multiprocessing removes its own folder inside this one, with priority -100.
        Finalize(None, shutil.rmtree, (self.folder, True), exitpriority=-200)
        return lines

    def _find_processes(self) -> list[psutil.Process]:
        processes = []
        for process in psutil.process_iter():
            try:
                if process.pid == os.getpid() or process.environ().get(RUN_ENV) != str(self.folder):
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
            except psutil.Error:
                continue
        return [p for p in processes if not any(name in _command_line(p) for name in _HELPERS)]

    def _wait_for_shared_files(self) -> list[str]:
        """Those that stay. A concurrent run may be about to open or remove one of its own."""
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        left = self._find_shared_files()
        while left and time.monotonic() < deadline:
            time.sleep(0.5)
            left = sorted({*left} & {*self._find_shared_files()})
        return left

    def _find_shared_files(self) -> list[str]:
        """New shared-memory files that no process has open. Those of other runs are in use.

        Semaphores of killed child processes, such as the lock of a progress bar, are not among
        them: this process's resource tracker removes those when it ends."""
        new = set(_list_names(_SHARED_MEMORY)) - self._initial_shared
        if getattr(resource_tracker._resource_tracker, "_pid", None) is not None:
            new = {name for name in new if not name.startswith("sem.mp-")}
        return sorted(new - _in_use(_SHARED_MEMORY)) if new else []


def _list_names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _in_use(folder: Path) -> set[str]:
    """Names of the files in `folder` that any process has mapped or open."""
    names = set()
    for process in psutil.process_iter():
        try:
            paths = [file.path for file in process.open_files()]
            maps = Path(f"/proc/{process.pid}/maps").read_text()  # psutil would sum up their pages
        except (psutil.Error, OSError):
            continue
        paths += [line.split(maxsplit=5)[-1] for line in maps.splitlines()]
        names |= {Path(path).name for path in paths if Path(path).parent == folder}
    return names


def _test_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("PYTEST_CURRENT_TEST", "outside of a test")
    except psutil.Error:
        return "exited"


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:300]
    except psutil.Error:
        return "exited"

"""What a test run leaves behind: processes, and files of temporary folders and of shared memory.

The run's temporary folder is its own, and every process it starts inherits a mark, so another run
on the same machine is never taken for this one. pytest tells every process which test was on when
it started; which test a file came with is noted after each.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from multiprocessing.util import Finalize
from pathlib import Path

import psutil

MARK = "RAYZERO_TEST_RUN"
LIMIT_S = 60.0
"""How long processes that were told to end may take."""
_SHARED = Path("/dev/shm")
# Python's own helpers end with the process that has them.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# Ray, torch and Python's own libraries keep some more; all goes with the run's folder.
_OURS = ("rayzero", "rz")


class Run:
    """A test run and its temporary folder. The first process of a run owns both."""

    def __init__(self) -> None:
        self.is_first = MARK not in os.environ
        if self.is_first:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
            # Short: sockets lie in it, and their paths may have 107 characters.
            os.environ[MARK] = tempfile.mkdtemp(prefix="rz-", dir="/tmp")
        self.folder = Path(os.environ[MARK])
        os.environ["TMPDIR"] = str(self.folder)
        # Each of xdist's processes has one of its own: Ray notes there which cluster is "auto".
        rays = self.folder / os.environ.get("PYTEST_XDIST_WORKER", "")
        rays.mkdir(exist_ok=True)
        os.environ["RAY_TMPDIR"] = str(rays)
        tempfile.tempdir = str(self.folder)
        self._shared = set(_names(_SHARED))
        self.seen: dict[str, str] = {}

    def note(self, test: str) -> None:
        """Notes which files are there for the first time."""
        for name in _names(self.folder):
            self.seen.setdefault(name, test)

    def end(self) -> list[str]:
        """Kills and removes what is left; a line for each."""
        until = time.monotonic() + LIMIT_S
        while (left := self._processes()) and time.monotonic() < until:
            time.sleep(0.2)
        lines = [f"process {one.pid}, {_test_of(one)}: {_title(one)}" for one in left]
        for one in left:
            one.kill()
        psutil.wait_procs(left, timeout=5)
        files = [name for name in _names(self.folder) if name.startswith(_OURS)]
        lines += [f"{self.folder / name}, {self.seen.get(name, '?')}" for name in files]
        lines += [f"{_SHARED / name}" for name in self._shared_files()]
        # Behind multiprocessing's own folder in it, which it removes at the end with priority -100.
        Finalize(None, shutil.rmtree, (self.folder, True), exitpriority=-200)
        return lines

    def _processes(self) -> list[psutil.Process]:
        found = []
        for one in psutil.process_iter():
            try:
                ours = one.pid != os.getpid() and one.environ().get(MARK) == str(self.folder)
                if ours and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
            except psutil.Error:
                continue
        return [one for one in found if not any(name in _title(one) for name in _HELPERS)]

    def _shared_files(self) -> list[str]:
        """Those that came with this run and that nobody has open: other runs' are in use."""
        new = set(_names(_SHARED)) - self._shared
        return sorted(new - _in_use(_SHARED)) if new else []


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _in_use(folder: Path) -> set[str]:
    """Names of files of the folder that a process has mapped or open."""
    found = set()
    for one in psutil.process_iter():
        try:
            paths = [each.path for each in [*one.memory_maps(), *one.open_files()]]
        except psutil.Error:
            continue
        found |= {Path(path).name for path in paths if Path(path).parent == folder}
    return found


def _test_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("PYTEST_CURRENT_TEST", "of no test")
    except psutil.Error:
        return "gone by now"


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:300]
    except psutil.Error:
        return "gone by now"

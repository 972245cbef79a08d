"""A save that is killed at any system call leaves either the old or the new checkpoint complete."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from safetensors import safe_open

from rayzero.engine.checkpoint import store_local
from rayzero.engine.checkpoint.catalogue import list_checkpoints, newest_complete, prune_checkpoints
from rayzero.engine.checkpoint.verify import verify_checkpoint
from tests.engine.checkpoint.saving import blocks, bytes_of, check_content, read_manifest, save

CALLS = ("open", "write", "fsync", "close", "link", "rename", "mkdir", "unlink")


class KillingOs:
    """A proxy of the `os` module that kills the process after the n-th call that modifies a disk.
    What is written before the next call is the same."""

    def __init__(self, count: int) -> None:
        self.calls: list[str] = []
        self.log: list[tuple[str, str]] = []  # each call and its file
        self._names: dict[int, str] = {}
        self._count = count

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            fatal = len(self.calls) == self._count
            self.calls.append(name)
            target = args[1] if name in ("link", "rename") else args[0]
            file = self._names[target] if isinstance(target, int) else Path(target).name
            self.log.append((name, file))
            if fatal and name == "write":  # torn write: only a part reaches the disk
                fd, data = args
                return real(fd, data[: len(data) // 2]), self._kill()
            try:
                result = real(*args, **kwargs)
                if name == "open":
                    self._names[result] = file
                return result
            finally:
                if fatal:
                    self._kill()

        return call

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def save_and_kill(job: Path, step: int, count: int) -> None:
    store_local.os = KillingOs(count)  # type: ignore[assignment]
    save(job, step)


@pytest.fixture
def folder(tmp_path):
    """A folder in memory if possible: the tests save hundreds of times, and SIGKILL keeps tmpfs."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def run_killed(job: Path, step: int, count: int) -> int:
    """Save in a child that is killed; return its exit code. Forks, which is fast."""
    pid = os.fork()
    if pid == 0:
        try:
            save_and_kill(job, step, count)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def record_calls(job: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> KillingOs:
    """System calls of a save, in order."""
    killing_os = KillingOs(-1)
    with monkeypatch.context() as patch:
        patch.setattr(store_local, "os", killing_os)
        save(job, step)
    return killing_os


def check_complete(folder: str, step: int) -> None:
    """Check the content with rayzero's reader and with the safetensors library."""
    assert not any(problem.makes_unusable for problem in verify_checkpoint(folder))
    check_content(folder, step)
    manifest = read_manifest(folder)
    for file, block in zip(manifest.files, blocks(step), strict=True):
        with safe_open(Path(folder, file.name), framework="pt") as opened:
            for part in block.index.ranges:
                tensor = opened.get_tensor(f"{part.name}[{part.start}:{part.stop}]")
                raw = block.data[part.offset : part.offset + tensor.nbytes]
                assert bytes_of(tensor) == raw


@pytest.mark.parametrize("again", [False, True], ids=["new step", "existing step"])
def test_save_killed_at_any_system_call(folder, monkeypatch, again):
    """The job has step 1; the killed save writes step 2, or step 1 again."""
    base = folder / "base"
    first = save(base, 1, created_s=1.0)
    step = 1 if again else 2
    shutil.copytree(base, folder / "dry")
    calls = record_calls(folder / "dry", step, monkeypatch).calls
    assert {"write", "fsync", "rename", "open"} <= set(calls)
    committed = []
    for count in range(len(calls)):
        job = folder / f"killed-{count}"
        shutil.copytree(base, job)
        assert run_killed(job, step, count) == -9, f"it survived call {count}, {calls[count]}"
        newest = newest_complete(str(job))
        check_complete(newest.folder, newest.step)
        assert {entry.status for entry in list_checkpoints(str(job))} <= {"whole", "unfinished"}
        committed.append(newest.manifest != first)
        # the next save works with any leftovers
        save(job, 3)
        assert newest_complete(str(job)).step == 3
        shutil.rmtree(job)
    assert sorted(committed) == committed, "a committed checkpoint stays committed"
    committing = max(at for at, name in enumerate(calls) if name in ("link", "rename"))
    assert calls[committing] == ("rename" if again else "link")
    assert committed.index(True) == committing


def test_leftovers_are_pruned(tmp_path, monkeypatch):
    base = tmp_path / "job"
    save(base, 1)
    shutil.copytree(base, tmp_path / "dry")
    calls = record_calls(tmp_path / "dry", 2, monkeypatch).calls
    assert run_killed(base, 2, calls.index("rename") - 1) == -9
    (leftover,) = (base / "step-2").iterdir()
    assert leftover.name.endswith(".partial")
    save(base, 3)
    assert prune_checkpoints(str(base), keep=5).swept == (2,)
    assert sorted(path.name for path in base.iterdir()) == ["step-1", "step-3"]


def test_files_are_synced_before_rename_and_before_the_manifest(tmp_path, monkeypatch):
    """A power loss, unlike a kill, loses data that is not synced."""
    monkeypatch.setattr(store_local, "token_hex", lambda size: "ab" * size)
    log = record_calls(tmp_path / "job", 1, monkeypatch).log
    log = [call for call in log if call[0] not in ("open", "close", "unlink")]
    log = [call for number, call in enumerate(log) if number == 0 or log[number - 1] != call]
    expected = [("mkdir", "job"), ("fsync", tmp_path.name), ("mkdir", "step-1"), ("fsync", "job")]
    for name in (file.name for file in read_manifest(tmp_path / "job" / "step-1").files):
        partial = f".{name}.partial"
        expected += [("write", partial), ("fsync", partial), ("rename", name), ("fsync", "step-1")]
    name, partial = "manifest.json", ".manifest.json.abababab.partial"
    expected += [("write", partial), ("fsync", partial), ("link", name), ("fsync", "step-1")]
    assert log == expected

"""A save that is killed at any system call leaves the old or the new checkpoint complete."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors import safe_open

from rayzero.engine.checkpoint import store_local
from rayzero.engine.checkpoint.catalogue import list_checkpoints, newest_complete, prune_checkpoints
from rayzero.engine.checkpoint.reader import CheckpointSource, verify_checkpoint
from tests.engine.checkpoint import killed
from tests.engine.checkpoint.saving import blocks, save


@pytest.fixture
def folder(tmp_path):
    """In memory where there is such a place: hundreds of saves, and a kill loses nothing there."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(dir=memory) as made:
        yield Path(made)


def run(job: Path, step: int, count: int, where: str) -> int:
    """The exit status of a child that saves and dies. A fork: there are a hundred of them."""
    pid = os.fork()
    if pid == 0:
        try:
            killed.main(str(job), str(step), str(count), where)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def calls(job: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a save asks of the system, in order."""
    system = killed.DeadlySystem(-1, True)
    with monkeypatch.context() as patch:
        patch.setattr(store_local, "os", system)
        save(job, step)
    return system.made


def check_whole(folder: str, step: int) -> None:
    """With our reader, and with the safetensors library."""
    assert [one for one in verify_checkpoint(folder) if one.makes_unusable] == []
    source = CheckpointSource(folder)
    for number, block in enumerate(blocks(step)):
        into = bytearray(len(block.data))
        source.read(number, 0, memoryview(into))
        assert into == block.data
        path = Path(folder, source.manifest.files[number].name)
        with safe_open(str(path), framework="pt") as file:
            for one in block.table.ranges:
                tensor = file.get_tensor(f"{one.name}[{one.start}:{one.stop}]")
                raw = block.data[one.offset : one.offset + tensor.nbytes]
                assert tensor.view(-1).view(torch.uint8).numpy().tobytes() == raw
    source.close()


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("again", [False, True], ids=["a new step", "a step that is there"])
def test_killed_at_any_call_of_the_system(folder, monkeypatch, where, again):
    """In a job that has step 1: step 2 is saved, or step 1 once more."""
    base = folder / "base"
    first = save(base, 1, created_s=1.0)
    step = 1 if again else 2
    shutil.copytree(base, folder / "dry")
    made = calls(folder / "dry", step, monkeypatch)
    assert {"write", "fsync", "rename", "open"} <= set(made)
    committed = []
    for count in range(len(made)):
        job = folder / f"killed-{count}"
        shutil.copytree(base, job)
        assert run(job, step, count, where) == -9, f"it outlived call {count}, {made[count]}"
        newest = newest_complete(str(job))
        check_whole(newest.folder, newest.step)
        assert all(one.status in ("whole", "unfinished") for one in list_checkpoints(str(job)))
        committed.append(newest.manifest != first)
        # the next save, and the sweep after it work whatever was left
        save(job, 3)
        assert newest_complete(str(job)).step == 3
        shutil.rmtree(job)
    assert sorted(committed) == committed, "once it is there, it stays"
    last_rename = len(made) - 1 - made[::-1].index("rename")
    assert committed.index(True) == last_rename + (where == "before")


def test_what_was_left_is_swept(tmp_path, monkeypatch):
    base = tmp_path / "job"
    save(base, 1)
    shutil.copytree(base, tmp_path / "dry")
    made = calls(tmp_path / "dry", 2, monkeypatch)
    assert run(base, 2, made.index("rename"), "before") == -9
    (left,) = (base / "step-2").iterdir()
    assert left.name.endswith(".partial")
    save(base, 3)
    assert prune_checkpoints(str(base), keep=5).swept == (2,)
    assert sorted(path.name for path in base.iterdir()) == ["step-1", "step-3"]


def test_bytes_are_durable_before_their_name_and_files_before_the_manifest(tmp_path, monkeypatch):
    """What no kill can show: a power loss undoes whatever was not synced."""
    log: list[tuple[str, str]] = []
    names: dict[int, str] = {}
    real = {name: getattr(os, name) for name in ("open", "fsync", "rename", "write", "mkdir")}

    def opened(path, *rest):
        fd = real["open"](path, *rest)
        names[fd] = Path(path).name
        return fd

    def synced(fd):
        log.append(("fsync", names[fd]))
        real["fsync"](fd)

    def renamed(old, new):
        log.append(("rename", Path(new).name))
        real["rename"](old, new)

    def wrote(fd, data):
        if not log or log[-1] != ("write", names[fd]):
            log.append(("write", names[fd]))
        return real["write"](fd, data)

    def made(path, *rest):
        log.append(("mkdir", Path(path).name))
        real["mkdir"](path, *rest)

    for name, fake in (
        ("open", opened),
        ("fsync", synced),
        ("rename", renamed),
        ("write", wrote),
        ("mkdir", made),
    ):
        monkeypatch.setattr(store_local.os, name, fake)
    manifest = save(tmp_path / "job", 1)
    expected = [
        *(("mkdir", "job"), ("fsync", tmp_path.name), ("mkdir", "step-1"), ("fsync", "job")),
    ]
    for name in (*(one.name for one in manifest.files), "manifest.json"):
        partial = f".{name}.partial"
        expected += [("write", partial), ("fsync", partial), ("rename", name), ("fsync", "step-1")]
    assert log == expected

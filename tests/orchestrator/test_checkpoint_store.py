"""The checkpoint store on a real disk: resume point, commit, retention, late writes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.checkpoint import store_local
from rayzero.engine.checkpoint.catalogue import list_checkpoints
from rayzero.engine.checkpoint.manifest import RankFile
from rayzero.engine.checkpoint.verify import verify_checkpoint
from rayzero.engine.checkpoint.writer import write_rank_file
from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.orchestrator.checkpoint_store import CheckpointStore
from rayzero.orchestrator.job.lease import LeaseLostError
from rayzero.orchestrator.policies.recovery import CheckpointRef
from tests.orchestrator.support import TABLE, StoreInFolder, plan


def test_resume_auto_selects_newest_checkpoint(tmp_path: Path):
    folder_store = StoreInFolder(tmp_path)
    assert folder_store.resume_point() is None
    folder_store.save(10, 20)
    assert folder_store.resume_point() == folder_store.ref(20)
    assert asyncio.run(folder_store.store.newest(frozenset({20}))) == folder_store.ref(10)


def test_damaged_and_incomplete_checkpoints_are_skipped(tmp_path: Path):
    folder_store = StoreInFolder(tmp_path)
    folder_store.save(10, 20)
    (data,) = (tmp_path / "job" / "step-20").glob("rank-*")
    data.write_bytes(data.read_bytes()[:-1])
    (tmp_path / "job" / "step-30").mkdir()
    assert folder_store.resume_point() == folder_store.ref(10)
    (warning,) = folder_store.warnings
    assert "step-20 is skipped" in warning


def flip_last_byte(step_folder: Path) -> None:
    (data,) = step_folder.glob("rank-*")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)


def mark(folder_store: StoreInFolder, step: int, problem: str = "") -> None:
    asyncio.run(folder_store.store.mark_damaged(folder_store.ref(step), problem))


def test_flipped_bytes_are_listed_once_a_load_has_found_them(tmp_path: Path):
    folder_store, folder = StoreInFolder(tmp_path), tmp_path / "job"
    folder_store.save(10, 20)
    flip_last_byte(folder / "step-20")
    assert folder_store.resume_point() == folder_store.ref(20)
    for step in (10, 20):
        mark(folder_store, step, "a load failed")
    whole, damaged = list_checkpoints(str(folder))
    assert (whole.status, damaged.status) == ("whole", "damaged")
    assert "is damaged between bytes" in damaged.problem
    assert folder_store.resume_point() == folder_store.ref(10)
    assert asyncio.run(folder_store.store.newest(frozenset())) == folder_store.resume_point()
    assert {it.kind for it in verify_checkpoint(damaged.folder)} == {"flipped"}
    flip_last_byte(folder / "step-20")  # copied back
    (problem,) = verify_checkpoint(damaged.folder)
    assert (problem.file, problem.makes_unusable) == ("damaged.json", False)
    folder_store.save(20)
    assert list_checkpoints(str(folder))[1].is_complete, "the mark is of an older file"


def test_mark_of_a_damaged_checkpoint_is_removed_with_it(tmp_path: Path):
    folder_store = StoreInFolder(tmp_path, keep=1)
    folder_store.save(10)
    flip_last_byte(tmp_path / "job" / "step-10")
    mark(folder_store, 10)
    folder_store.save(20)
    assert asyncio.run(folder_store.store.prune()) == (10,)
    assert not (tmp_path / "job" / "step-10").exists()


def test_only_the_lease_owner_marks_and_only_its_own_checkpoints(tmp_path: Path):
    folder_store = StoreInFolder(tmp_path)
    folder_store.save(10)
    flip_last_byte(folder := tmp_path / "job" / "step-10")
    other = CheckpointStore(plan(tmp_path, checkpoint={"path": str(tmp_path / "other")}), print)
    asyncio.run(other.mark_damaged(CheckpointRef(10, str(folder)), ""))

    def refuse() -> None:
        raise ConfigError("another process owns it")

    settings = {"path": str(tmp_path)}
    fenced = CheckpointStore(plan(tmp_path, checkpoint=settings), print, check_lease=refuse)
    with pytest.raises(ConfigError, match="owns it"):
        asyncio.run(fenced.mark_damaged(CheckpointRef(10, str(folder)), ""))
    assert not (folder / "damaged.json").exists()


@pytest.mark.parametrize("adopting", [False, True])
def test_a_folder_with_damaged_checkpoints_only_needs_a_decision(tmp_path: Path, adopting: bool):
    folder_store = StoreInFolder(tmp_path, adopting=adopting)
    folder_store.save(10)
    (tmp_path / "job" / "step-20").mkdir()
    flip_last_byte(tmp_path / "job" / "step-10")
    mark(folder_store, 10)
    with pytest.raises(ConfigError, match=r"step 10: rank-.* is damaged") as refused:
        folder_store.resume_point()
    assert "--restart" in str(refused.value)
    anew = StoreInFolder(tmp_path, adopting=adopting, resume="scratch")
    assert anew.resume_point() is None
    anew.save(5)
    if adopting:  # the run that began anew
        assert anew.resume_point() == anew.ref(5)
    else:
        with pytest.raises(ConfigError, match="1 checkpoint that can be used, the newest of ste"):
            anew.resume_point()


def test_never_resume_rejects_existing_checkpoints(tmp_path: Path):
    folder_store = StoreInFolder(tmp_path, resume="never")
    assert folder_store.resume_point() is None
    folder_store.save(10)
    with pytest.raises(ConfigError, match="1 checkpoint, the newest of step 10"):
        folder_store.resume_point()


def test_resume_from_named_checkpoint(tmp_path: Path):
    store, job = StoreInFolder(tmp_path), tmp_path / "job"
    store.save(10, 20)
    named = StoreInFolder(tmp_path, resume=str(job / "step-10"))
    assert named.resume_point() == store.ref(10)
    assert StoreInFolder(tmp_path, resume=str(job)).resume_point() == store.ref(20)
    (tmp_path / "foreign").mkdir()
    foreign = str(tmp_path / "foreign")
    assert StoreInFolder(tmp_path, resume=foreign).resume_point() == CheckpointRef(0, foreign)
    with pytest.raises(ConfigError, match=r"checkpoint\.resume"):
        StoreInFolder(tmp_path, resume=str(tmp_path / "nowhere")).resume_point()
    (job / "step-10" / "manifest.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="cannot be resumed from"):
        StoreInFolder(tmp_path, resume=str(job / "step-10")).resume_point()


@pytest.mark.parametrize(
    "text", ["job/step-10", "./other/../job/step-10/", "link/step-10", "{}/job/step-10", "job"]
)
def test_own_checkpoint_is_own_however_it_is_written(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
):
    """So that the summary's `newest_checkpoint` names it if no other one is written."""
    StoreInFolder(tmp_path).save(10)
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("job")
    monkeypatch.chdir(tmp_path)
    resume = text.format(f"file://{tmp_path}")
    own = CheckpointRef(10, str(tmp_path / "job" / "step-10"))
    assert StoreInFolder(tmp_path, resume=resume).resume_point() == own


def test_prune_keeps_newest_and_all_multiples(tmp_path: Path):
    folder_store = StoreInFolder(tmp_path, keep=2, keep_every=20)
    folder_store.save(10, 20, 30, 40, 50)
    asyncio.run(folder_store.store.prune())
    remaining = sorted(path.name for path in (tmp_path / "job").iterdir() if path.is_dir())
    assert remaining == ["step-20", "step-40", "step-50"]


# A controller that lost its lease writes late: whatever its successor did meanwhile, and at
# whichever call, the successor's checkpoint stays.
CALLS = ("open", "write", "fsync", "close", "link", "unlink", "rename", "rmdir", "mkdir", "scandir")


class InterruptedOs:
    """The module `os`; before the file system call of number `at`, `action` runs once."""

    def __init__(self, at: int, action: Callable[[], None]) -> None:
        self.at, self.action, self.calls, self.interrupted = at, action, 0, ""

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                self.interrupted = name
                self.action()
            return real(*args, **kwargs)

        return call


class Holder:
    """A controller's access to the job's folder."""

    def __init__(self, folder: Path, generation: int) -> None:
        settings = {"path": str(folder), "keep": 1}
        self.generation, self.is_fenced = generation, False
        job = plan(folder, checkpoint=settings)
        self.store = CheckpointStore(job, lambda _: None, check_lease=self._check_lease)

    def _check_lease(self) -> None:
        if self.is_fenced:
            raise LeaseLostError("another process has taken over the folder")

    def write_file(self, step: int) -> RankFile:
        """As the vault does."""
        data, about = memoryview(bytes([self.generation]) * 16), {"generation": self.generation}
        folder = self.store.folder(step)
        about |= {"world_size": 1}
        return write_rank_file(folder, 0, TABLE, {"step": step}, data, **about)

    def commit(self, step: int, file: RankFile) -> None:
        asyncio.run(self.store.commit(step, self.generation, [file]))

    def prune(self) -> None:
        asyncio.run(self.store.prune())


@pytest.mark.parametrize(
    ("is_committed_before", "successor_goes_on"), [(False, False), (True, False), (False, True)]
)
def test_late_commit_leaves_the_checkpoint_of_the_successor(
    is_committed_before: bool,
    successor_goes_on: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # nothing here tests a loss of power
    ended, interrupted, refused = False, 0, 0
    while not ended:
        folder = tmp_path / str(interrupted)
        late, successor = Holder(folder, 2), Holder(folder, 3)
        if is_committed_before:
            earlier = Holder(folder, 1)
            earlier.commit(10, earlier.write_file(10))
        file = late.write_file(10)
        age(folder)

        def take_over(late: Holder = late, successor: Holder = successor) -> None:
            late.is_fenced = True
            for step in (10, 20) if successor_goes_on else (10,):
                successor.commit(step, successor.write_file(step))
                successor.prune()

        system = InterruptedOs(interrupted + 1, take_over)
        with monkeypatch.context() as patch:
            patch.setattr(store_local, "os", system)
            try:
                late.commit(10, file)
                late.prune()
            except RayzeroError:
                refused += 1
        ended = system.calls <= interrupted
        if not ended:
            assert late.is_fenced
            newest = list_checkpoints(successor.store.folder(20 if successor_goes_on else 10))[-1]
            assert newest.is_complete, newest.problem
            assert {problem.kind for problem in verify_checkpoint(newest.folder)} <= {"foreign"}
            assert newest.manifest
            # No file system has "rename if the target is still that file"; what then stands there
            # is another whole checkpoint of this step.
            is_replaced = is_committed_before and system.interrupted == "rename"
            assert newest.manifest.generation == (2 if is_replaced else 3)
        interrupted += 1
    assert refused > 5


def age(folder: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (1e9, 1e9))

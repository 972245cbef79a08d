"""A controller that lost its lease writes late: whatever its successor did meanwhile, and at
whichever call, the successor's checkpoint stays."""

from __future__ import annotations

import asyncio
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
from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.checkpoint_store import CheckpointStore
from rayzero.orchestrator.job.lease import LeaseLostError
from tests.orchestrator.support import plan
from tests.orchestrator.test_checkpoint_store import TABLE

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

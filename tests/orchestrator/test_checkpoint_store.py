"""The checkpoint store on a real disk: resume point, commit and retention."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.checkpoint.writer import write_rank_file
from rayzero.engine.errors import ConfigError
from rayzero.engine.layout.state_index import BlockIndex, LogicalTensor, TensorRange
from rayzero.orchestrator.checkpoint_store import CheckpointStore
from rayzero.orchestrator.policies.recovery import CheckpointRef
from tests.orchestrator.support import plan

TABLE = BlockIndex(
    {"weights/w": LogicalTensor("F32", (4,))}, (TensorRange("weights/w", 0, 4, 0),), 16
)


class StoreInFolder:
    """A checkpoint store in a folder, with its warnings."""

    def __init__(self, folder: Path, **checkpoint: Any) -> None:
        self.warnings: list[str] = []
        settings = {"path": str(folder), **checkpoint}
        self.store = CheckpointStore(plan(folder, checkpoint=settings), self.warnings.append)

    def save(self, *steps: int) -> None:
        for step in steps:
            file = write_rank_file(
                self.store.folder(step),
                0,
                TABLE,
                {"step": step},
                memoryview(bytearray(16)),
                generation=1,
                world_size=1,
            )
            asyncio.run(self.store.commit(step, 1, [file]))

    def resume_point(self) -> CheckpointRef | None:
        return asyncio.run(self.store.resolve_resume())


def test_resume_auto_selects_newest_checkpoint(tmp_path: Path):
    folder_store = StoreInFolder(tmp_path)
    assert folder_store.resume_point() is None
    folder_store.save(10, 20)
    assert folder_store.resume_point() == CheckpointRef(20, str(tmp_path / "job" / "step-20"))
    assert asyncio.run(folder_store.store.newest(frozenset({20}))) == CheckpointRef(
        10, str(tmp_path / "job" / "step-10")
    )


def test_damaged_and_incomplete_checkpoints_are_skipped(
    tmp_path: Path,
):
    folder_store = StoreInFolder(tmp_path)
    folder_store.save(10, 20)
    (data,) = (tmp_path / "job" / "step-20").glob("rank-*")
    data.write_bytes(data.read_bytes()[:-1])
    (tmp_path / "job" / "step-30").mkdir()
    newest = folder_store.resume_point()
    assert newest is not None
    assert newest.step == 10
    (warning,) = folder_store.warnings
    assert "step-20 is skipped" in warning


def test_never_resume_rejects_existing_checkpoints(tmp_path: Path):
    folder_store = StoreInFolder(tmp_path, resume="never")
    assert folder_store.resume_point() is None
    folder_store.save(10)
    with pytest.raises(ConfigError, match="1 checkpoint, the newest of step 10"):
        folder_store.resume_point()


def test_resume_from_named_checkpoint(tmp_path: Path):
    StoreInFolder(tmp_path).save(10, 20)
    job = tmp_path / "job"
    assert StoreInFolder(tmp_path, resume=str(job / "step-10")).resume_point() == CheckpointRef(
        10, str(job / "step-10")
    )
    assert StoreInFolder(tmp_path, resume=str(job)).resume_point() == CheckpointRef(
        20, str(job / "step-20")
    )
    (tmp_path / "foreign").mkdir()
    foreign = str(tmp_path / "foreign")
    assert StoreInFolder(tmp_path, resume=foreign).resume_point() == CheckpointRef(0, foreign)
    with pytest.raises(ConfigError, match=r"checkpoint\.resume"):
        StoreInFolder(tmp_path, resume=str(tmp_path / "nowhere")).resume_point()
    (job / "step-10" / "manifest.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="cannot be resumed from"):
        StoreInFolder(tmp_path, resume=str(job / "step-10")).resume_point()


def test_prune_keeps_newest_and_all_multiples(tmp_path: Path):
    folder_store = StoreInFolder(tmp_path, keep=2, keep_every=20)
    folder_store.save(10, 20, 30, 40, 50)
    asyncio.run(folder_store.store.prune())
    remaining = sorted(path.name for path in (tmp_path / "job").iterdir() if path.is_dir())
    assert remaining == ["step-20", "step-40", "step-50"]

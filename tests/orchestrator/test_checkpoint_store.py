"""The archive on a real disk: what a run begins from, commits, and what is kept."""

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


class Box:
    """An archive in a folder, and what it told."""

    def __init__(self, folder: Path, **checkpoint: Any) -> None:
        self.told: list[str] = []
        wanted = {"path": str(folder), **checkpoint}
        self.archive = CheckpointStore(plan(folder, checkpoint=wanted), self.told.append)

    def save(self, *steps: int) -> None:
        for step in steps:
            file = write_rank_file(
                self.archive.folder(step),
                0,
                TABLE,
                {"step": step},
                memoryview(bytearray(16)),
                generation=1,
                world_size=1,
            )
            asyncio.run(self.archive.commit(step, 1, [file]))

    def begin(self) -> CheckpointRef | None:
        return asyncio.run(self.archive.resolve_resume())


def test_auto_begins_from_the_newest_there_is(tmp_path: Path):
    box = Box(tmp_path)
    assert box.begin() is None
    box.save(10, 20)
    assert box.begin() == CheckpointRef(20, str(tmp_path / "job" / "step-20"))
    assert asyncio.run(box.archive.newest(frozenset({20}))) == CheckpointRef(
        10, str(tmp_path / "job" / "step-10")
    )


def test_a_damaged_one_is_named_and_skipped_and_an_unfinished_one_does_not_exist(tmp_path: Path):
    box = Box(tmp_path)
    box.save(10, 20)
    (data,) = (tmp_path / "job" / "step-20").glob("rank-*")
    data.write_bytes(data.read_bytes()[:-1])
    (tmp_path / "job" / "step-30").mkdir()
    begun = box.begin()
    assert begun is not None
    assert begun.step == 10
    (told,) = box.told
    assert "step-20 is skipped" in told


def test_never_refuses_a_folder_with_checkpoints(tmp_path: Path):
    box = Box(tmp_path, resume="never")
    assert box.begin() is None
    box.save(10)
    with pytest.raises(ConfigError, match="1 checkpoint, the newest of step 10"):
        box.begin()


def test_a_checkpoint_by_name(tmp_path: Path):
    Box(tmp_path).save(10, 20)
    job = tmp_path / "job"
    assert Box(tmp_path, resume=str(job / "step-10")).begin() == CheckpointRef(
        10, str(job / "step-10")
    )
    assert Box(tmp_path, resume=str(job)).begin() == CheckpointRef(20, str(job / "step-20"))
    (tmp_path / "foreign").mkdir()
    foreign = str(tmp_path / "foreign")
    assert Box(tmp_path, resume=foreign).begin() == CheckpointRef(0, foreign)
    with pytest.raises(ConfigError, match=r"checkpoint\.resume"):
        Box(tmp_path, resume=str(tmp_path / "nowhere")).begin()
    (job / "step-10" / "manifest.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="cannot be resumed from"):
        Box(tmp_path, resume=str(job / "step-10")).begin()


def test_the_newest_are_kept_and_multiples_for_ever(tmp_path: Path):
    box = Box(tmp_path, keep=2, keep_every=20)
    box.save(10, 20, 30, 40, 50)
    asyncio.run(box.archive.prune())
    left = sorted(path.name for path in (tmp_path / "job").iterdir() if path.is_dir())
    assert left == ["step-20", "step-40", "step-50"]

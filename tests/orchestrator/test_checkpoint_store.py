"""The checkpoint store on a real disk: resume point, commit and retention."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.checkpoint.catalogue import list_checkpoints
from rayzero.engine.checkpoint.verify import verify_checkpoint
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

    def __init__(self, folder: Path, *, adopting: bool = False, **checkpoint: Any) -> None:
        self.warnings: list[str] = []
        settings = {"path": str(folder), **checkpoint}
        self.store = CheckpointStore(
            plan(folder, checkpoint=settings), self.warnings.append, adopting=adopting
        )

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


def flip_last_byte(step_folder: Path) -> None:
    (data,) = step_folder.glob("rank-*")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)


def mark(folder_store: StoreInFolder, step: int, problem: str = "") -> None:
    ref = CheckpointRef(step, folder_store.store.folder(step))
    asyncio.run(folder_store.store.mark_damaged(ref, problem))


def test_flipped_bytes_are_listed_once_a_load_has_found_them(tmp_path: Path):
    folder_store, folder = StoreInFolder(tmp_path), tmp_path / "job"
    folder_store.save(10, 20)
    flip_last_byte(folder / "step-20")
    assert folder_store.resume_point() == CheckpointRef(20, str(folder / "step-20"))
    for step in (10, 20):
        mark(folder_store, step, "a load failed")
    whole, damaged = list_checkpoints(str(folder))
    assert (whole.status, damaged.status) == ("whole", "damaged")
    assert "is damaged between bytes" in damaged.problem
    assert folder_store.resume_point() == CheckpointRef(10, str(folder / "step-10"))
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
        assert anew.resume_point() == CheckpointRef(5, str(tmp_path / "job" / "step-5"))
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

"""Files of frozen weights that the checkpoints of a job share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayzero.engine.checkpoint.catalogue import list_checkpoints, newest_complete, prune_checkpoints
from rayzero.engine.checkpoint.errors import CheckpointDamagedError
from rayzero.engine.checkpoint.verify import verify_checkpoint
from tests.engine.checkpoint.saving import (
    FROZEN_BYTES,
    check_content,
    read_manifest,
    save,
    write_files,
)


def bases(job: Path) -> list[str]:
    return sorted(path.name for path in (job / "base").iterdir())


def test_frozen_weights_are_written_once(tmp_path: Path) -> None:
    save(tmp_path, 1, frozen=0)
    written = bases(tmp_path)
    assert len(written) == 2, "one of each rank"
    save(tmp_path, 2, frozen=0)
    assert bases(tmp_path) == written
    second = sum(path.stat().st_size for path in (tmp_path / "step-2").iterdir())
    assert second < FROZEN_BYTES / 2, "headers, the manifest and what is trained"
    for step in (1, 2):
        check_content(f"{tmp_path}/step-{step}", step, frozen=0)
        assert verify_checkpoint(f"{tmp_path}/step-{step}") == []
    document = json.loads((tmp_path / "step-2" / "manifest.json").read_text())["checkpoint"]
    assert document["format_version"] == 2
    assert read_manifest(tmp_path / "step-2") == list_checkpoints(str(tmp_path))[1].manifest


def test_other_weights_or_ranks_get_other_files(tmp_path: Path) -> None:
    save(tmp_path, 1, frozen=0)
    save(tmp_path, 2, frozen=1)
    save(tmp_path, 3, world=3, frozen=0)
    assert len(bases(tmp_path)) == 2 + 2 + 3
    check_content(f"{tmp_path}/step-1", 1, frozen=0)
    check_content(f"{tmp_path}/step-2", 2, frozen=1)
    check_content(f"{tmp_path}/step-3", 3, world=3, frozen=0)


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_damaged_file_of_frozen_weights_is_named(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1, frozen=1)
    save(tmp_path, 2, frozen=0)
    name = next(name for name in bases(tmp_path) if name.startswith("step-2-rank-00001"))
    path = tmp_path / "base" / name
    raw = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(raw[:-1])
    else:
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    (problem,) = verify_checkpoint(f"{tmp_path}/step-2")
    assert (problem.file, problem.kind) == (f"base/{name}", damage)
    assert verify_checkpoint(f"{tmp_path}/step-1") == []
    if damage != "flipped":
        assert f"base/{name}" in list_checkpoints(str(tmp_path))[1].problem
        newest = newest_complete(str(tmp_path))
        assert newest is not None
        assert newest.step == 1
    with pytest.raises(CheckpointDamagedError, match=name):
        check_content(f"{tmp_path}/step-2", 2, frozen=0)


def test_prune_keeps_what_a_remaining_manifest_refers_to(tmp_path: Path) -> None:
    save(tmp_path, 1, frozen=0)
    save(tmp_path, 2, frozen=0)
    save(tmp_path, 3, frozen=1)
    save(tmp_path, 4, frozen=1)
    (tmp_path / "base" / "notes.txt").write_text("not rayzero's")
    shared = bases(tmp_path)
    prune_checkpoints(str(tmp_path), keep=3)
    assert bases(tmp_path) == shared, "step 2 refers to those that step 1 has written"
    check_content(f"{tmp_path}/step-2", 2, frozen=0)
    planned = prune_checkpoints(str(tmp_path), keep=2, dry_run=True)
    assert bases(tmp_path) == shared
    assert prune_checkpoints(str(tmp_path), keep=2) == planned
    assert planned.nbytes > FROZEN_BYTES
    assert [name for name in bases(tmp_path) if name.startswith("step-1-")] == []
    assert len(bases(tmp_path)) == 3
    check_content(f"{tmp_path}/step-3", 3, frozen=1)
    check_content(f"{tmp_path}/step-4", 4, frozen=1)


def test_prune_leaves_what_a_running_save_may_refer_to(tmp_path: Path) -> None:
    save(tmp_path, 1, frozen=0)
    write_files(f"{tmp_path}/step-2", 2, frozen=5)
    prune_checkpoints(str(tmp_path), keep=1)
    assert any(name.startswith("step-2-") for name in bases(tmp_path))

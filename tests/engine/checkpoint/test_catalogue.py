"""Listing, verifying and pruning checkpoints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.checkpoint import store_local
from rayzero.engine.checkpoint.catalogue import (
    list_checkpoints,
    newest_complete,
    prune_checkpoints,
    steps_to_keep,
)
from rayzero.engine.checkpoint.errors import CheckpointVersionError
from rayzero.engine.checkpoint.verify import verify_checkpoint
from rayzero.engine.errors import ConfigError
from tests.engine.checkpoint.saving import read_manifest, save, with_changes, write_files


def set_newer_version(folder: Path) -> None:
    """Change a manifest to an unsupported format version."""
    path = folder / "manifest.json"
    path.write_bytes(with_changes(path.read_bytes(), format_version=99))


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def cut(path: Path, nbytes: int) -> None:
    path.write_bytes(path.read_bytes()[:nbytes])


@pytest.fixture
def job(tmp_path):
    """A job's folder with three complete checkpoints and other files and folders."""
    for step in (10, 9, 100):
        save(tmp_path, step)
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "step-7").write_text("a file")
    (tmp_path / "step-x").mkdir()
    write_files(str(tmp_path / "step-110"), 110)
    return tmp_path


def statuses(job: Path) -> dict[int, str]:
    return {checkpoint.step: checkpoint.status for checkpoint in list_checkpoints(str(job))}


def test_list_checkpoints(job):
    set_newer_version(job / "step-9")
    checkpoints = list_checkpoints(str(job))
    assert [(checkpoint.step, checkpoint.status) for checkpoint in checkpoints] == [
        (9, "newer"),
        (10, "whole"),
        (100, "whole"),
        (110, "unfinished"),
    ]
    assert "version 99" in checkpoints[0].problem
    assert checkpoints[1].folder == str(job / "step-10")
    assert checkpoints[1].manifest == read_manifest(str(job / "step-10"))
    assert [entry.step for entry in list_checkpoints(str(job / "step-10"))] == [10]
    assert list_checkpoints(str(job / "step-11")) == []
    assert list_checkpoints(str(job / "absent")) == []


def test_newest_complete(job):
    assert newest_complete(str(job)).step == 100
    assert newest_complete(str(job), {100}).step == 10
    assert newest_complete(str(job), {9, 10, 100}) is None
    assert newest_complete(str(job / "absent")) is None


def put_huge_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 * 2**30)


# Neither opened nor read: a FIFO would block for ever, a device never end.
IRREGULAR = [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir]
MANIFEST = "manifest.json"


@pytest.mark.parametrize(
    ("name", "damage", "kind"),
    [
        ("rank", Path.unlink, "missing"),
        ("rank", lambda path: cut(path, 0), "cut"),
        ("rank", lambda path: cut(path, path.stat().st_size - 1), "cut"),
        ("rank", lambda path: path.write_bytes(path.read_bytes() + b"x"), "cut"),
        (MANIFEST, Path.unlink, "missing"),
        (MANIFEST, lambda path: cut(path, 100), "flipped"),
        (MANIFEST, lambda path: cut(path, 0), "flipped"),
        (MANIFEST, lambda path: flip(path, 200), "flipped"),
        *(("rank", lambda path, put=put: (path.unlink(), put(path)), "cut") for put in IRREGULAR),
        *(
            (MANIFEST, lambda path, put=put: (path.unlink(), put(path)), "flipped")
            for put in [*IRREGULAR, put_huge_file]
        ),
    ],
)
def test_newest_complete_skips_damaged_checkpoints(job, name, damage, kind):
    folder = job / "step-100"
    name = name if name == MANIFEST else read_manifest(folder).files[1].name
    damage(folder / name)
    assert newest_complete(str(job)).step == 10
    assert statuses(job)[100] == (
        "unfinished" if (name, kind) == (MANIFEST, "missing") else "damaged"
    )
    problems = [problem for problem in verify_checkpoint(str(folder)) if problem.makes_unusable]
    assert [(problem.file, problem.kind) for problem in problems] == [(name, kind)]


def test_manifest_of_another_step_is_damaged(job):
    shutil.copytree(job / "step-10", job / "step-20")
    assert statuses(job)[20] == "damaged"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "position", ["length", "header", "header's end", "first", "block 1", "last"]
)
def test_verify_locates_flipped_byte(job, rank, position):
    folder = job / "step-100"
    file = read_manifest(str(folder)).files[rank]
    offset = {
        "length": 0,
        "header": 30,
        "header's end": file.data_offset - 1,
        "first": file.data_offset,
        "block 1": file.data_offset + 256 * 1024,
        "last": file.nbytes - 1,
    }[position]
    assert verify_checkpoint(str(folder)) == []
    flip(folder / file.name, offset)
    (problem,) = verify_checkpoint(str(folder))
    assert (problem.file, problem.kind) == (file.name, "flipped")
    if offset < file.data_offset:
        assert "header" in problem.text
    else:
        start = file.data_offset + (offset - file.data_offset) // (256 * 1024) * 256 * 1024
        assert f"between bytes {start} and " in problem.text


def test_verify_reports_all_damaged_and_foreign_files(job):
    folder = job / "step-100"
    first, second = read_manifest(str(folder)).files
    flip(folder / first.name, first.nbytes - 1)
    cut(folder / second.name, 5)
    (folder / "notes.txt").write_text("notes")
    (folder / ".rank-00000-01234567.safetensors.partial").write_text("torn")
    problems = verify_checkpoint(str(folder))
    assert {(problem.file, problem.kind, problem.makes_unusable) for problem in problems} == {
        (first.name, "flipped", True),
        (second.name, "cut", True),
        ("notes.txt", "foreign", False),
        (".rank-00000-01234567.safetensors.partial", "foreign", False),
    }


def test_verify_reports_progress_and_rejects_newer_versions(job):
    reported: list[int] = []
    verify_checkpoint(str(job / "step-100"), reported.append)
    manifest = read_manifest(str(job / "step-100"))
    assert sum(reported) == sum(file.block_index.nbytes for file in manifest.files)
    set_newer_version(job / "step-100")
    with pytest.raises(CheckpointVersionError):
        verify_checkpoint(str(job / "step-100"))


STEPS = st.frozensets(st.integers(0, 60), max_size=12)


@given(STEPS, st.integers(1, 5), st.one_of(st.none(), st.integers(1, 10)))
def test_steps_to_keep(steps, keep, keep_every):
    kept = steps_to_keep(steps, keep, keep_every)
    assert kept <= steps
    for step in steps:
        is_recent = sum(other > step for other in steps) < keep
        is_multiple = keep_every is not None and step % keep_every == 0
        assert (step in kept) == (is_recent or is_multiple)
    assert steps_to_keep(kept, keep, keep_every) == kept


def test_prune_applies_retention_rule(job):
    for step in (20, 30, 40):
        save(job, step)
    (job / "step-9" / "notes.txt").write_text("not rayzero's")
    dry_run = prune_checkpoints(str(job), keep=2, keep_every=20, dry_run=True)
    assert sorted(statuses(job)) == [9, 10, 20, 30, 40, 100, 110]
    pruned = prune_checkpoints(str(job), keep=2, keep_every=20)
    assert pruned == dry_run
    assert pruned.kept == (20, 40, 100)
    assert pruned.removed == (9, 10, 30)
    assert sorted(statuses(job)) == [9, 20, 40, 100, 110]
    assert [path.name for path in (job / "step-9").iterdir()] == ["notes.txt"]
    assert (job / "summary.json").exists()
    assert pruned.nbytes > 3 * 400_000


def test_prune_counts_only_complete_checkpoints(job):
    """The newest two are damaged, so the two complete ones are kept."""
    for step in (200, 300):
        save(job, step)
        cut(job / f"step-{step}" / "manifest.json", 50)
    set_newer_version(job / "step-9")
    assert prune_checkpoints(str(job), keep=2).removed == ()
    save(job, 400)
    save(job, 500)
    assert prune_checkpoints(str(job), keep=2).removed == (10, 100, 200, 300)
    assert statuses(job) == {9: "newer", 400: "whole", 500: "whole"}


def age(folder: Path, by_s: float = 1000) -> None:
    for path in folder.iterdir():
        modified_s = path.stat().st_mtime - by_s
        os.utime(path, (modified_s, modified_s))


def test_prune_removes_leftovers_but_no_save_in_progress(job):
    write_files(str(job / "step-50"), 50)  # recently modified: a save in progress
    assert prune_checkpoints(str(job), keep=9).swept == ()
    age(job / "step-50")
    age(job / "step-110")  # older, but its step is the highest
    orphans = write_files(str(job / "step-10"), 10)
    (job / "step-10" / "notes.txt").write_text("notes")
    age(job / "step-10")
    pruned = prune_checkpoints(str(job), keep=9)
    assert pruned.swept == (10, 50)
    assert not (job / "step-50").exists()
    assert statuses(job) == {9: "whole", 10: "whole", 100: "whole", 110: "unfinished"}
    assert verify_checkpoint(str(job / "step-10"))[0].file == "notes.txt"
    assert not any((job / "step-10" / orphan.name).exists() for orphan in orphans)


def test_prune_removes_the_manifest_first(job, monkeypatch):
    """A partly removed checkpoint must not look complete."""
    removed: list[str] = []
    monkeypatch.setattr(store_local.os, "unlink", lambda path: removed.append(Path(path).name))
    prune_checkpoints(str(job), keep=2)
    assert removed[0] == "manifest.json"
    assert len(removed) == 3


def test_prune_requires_a_job_folder(job):
    with pytest.raises(ConfigError, match="is one checkpoint"):
        prune_checkpoints(str(job / "step-10"), keep=1)
    assert prune_checkpoints(str(job / "absent"), keep=1).kept == ()

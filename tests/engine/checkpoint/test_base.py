"""Files of frozen weights that the checkpoints of a job share."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from rayzero.engine.checkpoint.catalogue import list_checkpoints, newest_complete, prune_checkpoints
from rayzero.engine.checkpoint.errors import CheckpointDamagedError
from rayzero.engine.checkpoint.manifest import make_manifest
from rayzero.engine.checkpoint.reader import CheckpointSource
from rayzero.engine.checkpoint.verify import verify_checkpoint
from rayzero.engine.checkpoint.writer import commit_checkpoint, write_rank_file
from rayzero.engine.layout.state_index import BlockIndex, LogicalTensor, TensorRange
from tests.engine.checkpoint.saving import read_manifest

FROZEN, TRAINED = 600_000, 1_000  # elements of 4 bytes, in all


def block(step: int, rank: int, world: int, frozen_seed: int = 0) -> tuple[BlockIndex, bytes]:
    tensors = {
        "weights/frozen": LogicalTensor("F32", (FROZEN,)),
        "weights/adapter": LogicalTensor("F32", (TRAINED,)),
    }
    ranges, data = [], b""
    for seed, (name, tensor) in zip((frozen_seed, 1000 + step), tensors.items(), strict=True):
        start, stop = (tensor.numel * edge // world for edge in (rank, rank + 1))
        ranges.append(TensorRange(name, start, stop, len(data)))
        data += random.Random(seed).randbytes(4 * tensor.numel)[4 * start : 4 * stop]
    constant = ranges[1].offset
    return BlockIndex(tensors, tuple(ranges), len(data), constant), data


def save(job: Path, step: int, world: int = 2, frozen_seed: int = 0) -> None:
    folder = f"{job}/step-{step}"
    files = []
    for rank in range(world):
        table, data = block(step, rank, world, frozen_seed)
        files.append(
            write_rank_file(
                folder,
                rank,
                table,
                {"step": step, "rank": rank},
                memoryview(data),
                generation=1,
                world_size=world,
                share_base=True,
            )
        )
    commit_checkpoint(folder, make_manifest("job", step, 1, files, stage=2))


def bases(job: Path) -> list[str]:
    return sorted(path.name for path in (job / "base").iterdir())


def check_content(job: Path, step: int, world: int = 2, frozen_seed: int = 0) -> None:
    source = CheckpointSource(f"{job}/step-{step}")
    source.check_sizes()
    for rank in range(world):
        table, data = block(step, rank, world, frozen_seed)
        for offset, stop in [
            (0, len(data)),
            (table.constant_bytes - 7, table.constant_bytes + 9),
            (5, 300_000),
            (table.constant_bytes, table.constant_bytes),
            (len(data) - 3, len(data)),
        ]:
            into = bytearray(stop - offset)
            source.read(rank, offset, memoryview(into))
            assert into == data[offset:stop]
    source.close()


def test_frozen_weights_are_written_once(tmp_path: Path) -> None:
    save(tmp_path, 1)
    written = bases(tmp_path)
    assert len(written) == 2, "one of each rank"
    save(tmp_path, 2)
    assert bases(tmp_path) == written
    second = sum(path.stat().st_size for path in (tmp_path / "step-2").iterdir())
    assert second < 4 * TRAINED + 16_384, "headers, the manifest and the adapter"
    for step in (1, 2):
        check_content(tmp_path, step)
        assert verify_checkpoint(f"{tmp_path}/step-{step}") == []
    document = json.loads((tmp_path / "step-2" / "manifest.json").read_text())["checkpoint"]
    assert document["format_version"] == 2
    assert read_manifest(tmp_path / "step-2") == list_checkpoints(str(tmp_path))[1].manifest


def test_other_weights_or_ranks_get_other_files(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, frozen_seed=1)
    save(tmp_path, 3, world=3)
    assert len(bases(tmp_path)) == 2 + 2 + 3
    check_content(tmp_path, 1)
    check_content(tmp_path, 2, frozen_seed=1)
    check_content(tmp_path, 3, world=3)


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_damaged_file_of_frozen_weights_is_named(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1, frozen_seed=1)
    save(tmp_path, 2)
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
        check_content(tmp_path, 2)


def test_prune_keeps_what_a_remaining_manifest_refers_to(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    save(tmp_path, 3, frozen_seed=1)
    save(tmp_path, 4, frozen_seed=1)
    (tmp_path / "base" / "notes.txt").write_text("not rayzero's")
    shared = bases(tmp_path)
    prune_checkpoints(str(tmp_path), keep=3)
    assert bases(tmp_path) == shared, "step 2 refers to those that step 1 has written"
    check_content(tmp_path, 2)
    planned = prune_checkpoints(str(tmp_path), keep=2, dry_run=True)
    assert bases(tmp_path) == shared
    assert prune_checkpoints(str(tmp_path), keep=2) == planned
    assert planned.nbytes > 4 * FROZEN
    assert [name for name in bases(tmp_path) if name.startswith("step-1-")] == []
    assert len(bases(tmp_path)) == 3
    check_content(tmp_path, 3, frozen_seed=1)
    check_content(tmp_path, 4, frozen_seed=1)


def test_prune_leaves_what_a_running_save_may_refer_to(tmp_path: Path) -> None:
    save(tmp_path, 1)
    table, data = block(2, 0, 2, frozen_seed=5)
    write_rank_file(
        f"{tmp_path}/step-2",
        0,
        table,
        {"step": 2},
        memoryview(data),
        generation=1,
        world_size=2,
        share_base=True,
    )
    prune_checkpoints(str(tmp_path), keep=1)
    assert any(name.startswith("step-2-") for name in bases(tmp_path))

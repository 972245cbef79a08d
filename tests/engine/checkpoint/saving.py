"""Small checkpoints with reproducible bytes, written as by a job's vaults and controller."""

from __future__ import annotations

import json
import random
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from rayzero.engine.checkpoint import reader
from rayzero.engine.checkpoint.export_model import WholeTensors
from rayzero.engine.checkpoint.manifest import Manifest, RankFile, make_manifest
from rayzero.engine.checkpoint.store import join_url, open_store
from rayzero.engine.checkpoint.writer import commit_checkpoint, write_rank_file
from rayzero.engine.layout.state_index import (
    DTYPE_BYTES,
    BlockIndex,
    LogicalTensor,
    StateSource,
    TensorRange,
)

SHAPES = {"weights/a": ("F32", (50_000, 3)), "weights/b": ("BF16", (77,)), "buffers/n": ("I64", ())}


@dataclass(frozen=True)
class Block:
    """One rank's state."""

    index: BlockIndex
    data: bytes


FROZEN_BYTES = 2_400_000


def blocks(
    step: int, world: int = 2, shapes=SHAPES, gap: int = 5, frozen: int | None = None
) -> list[Block]:
    """Every tensor in `world` parts, with bytes that only depend on the step; before them, with a
    seed `frozen`, one that training does not change, with bytes of that seed."""
    rng = random.Random(step)
    tensor_bytes = {
        name: rng.randbytes(LogicalTensor(dtype, shape).numel * DTYPE_BYTES[dtype])
        for name, (dtype, shape) in shapes.items()
    }
    if frozen is not None:
        shapes = {"weights/frozen": ("F32", (FROZEN_BYTES // 4,))} | shapes
        tensor_bytes["weights/frozen"] = random.Random(frozen).randbytes(FROZEN_BYTES)
    blocks_by_rank = []
    for rank in range(world):
        ranges, data, tensors, constant_bytes = [], b"", {}, 0
        for name, (dtype, shape) in shapes.items():
            tensor = LogicalTensor(dtype, shape)
            start, stop = (tensor.numel * edge // world for edge in (rank, rank + 1))
            if start < stop:
                tensors[name] = tensor
                ranges.append(TensorRange(name, start, stop, len(data)))
                size = tensor.item_bytes
                data += tensor_bytes[name][start * size : stop * size] + b"\xee" * gap
            if name == "weights/frozen":
                constant_bytes = len(data)
        index = BlockIndex(tensors, tuple(ranges), len(data), constant_bytes)
        blocks_by_rank.append(Block(index, data))
    return blocks_by_rank


def write_files(
    folder: str, step: int, world: int = 2, gap: int = 5, frozen: int | None = None
) -> list[RankFile]:
    return [
        write_rank_file(
            folder,
            rank,
            block.index,
            {"step": step, "rank": rank},
            memoryview(block.data),
            generation=1,
            world_size=world,
        )
        for rank, block in enumerate(blocks(step, world, gap=gap, frozen=frozen))
    ]


def save(
    job: Path | str,
    step: int,
    world: int = 2,
    created_s: float | None = None,
    frozen: int | None = None,
) -> Manifest:
    """Write and commit a checkpoint in a job's folder."""
    folder = join_url(str(job), f"step-{step}")
    files = write_files(folder, step, world, frozen=frozen)
    manifest = make_manifest("job", step, 1, files, stage=2)
    if created_s is not None:
        manifest = replace(manifest, created_s=created_s)
    commit_checkpoint(folder, manifest)
    return manifest


def check_content(folder: str, step: int, world: int = 2, frozen: int | None = None) -> None:
    """Reads the checkpoint as a whole, and around its edges."""
    with closing(reader.CheckpointSource(folder)) as source:
        source.check_sizes()
        assert source.step == step
        for rank, block in enumerate(blocks(step, world, frozen=frozen)):
            assert source.metadata(rank) == {"step": step, "rank": rank}
            edge, end = block.index.constant_bytes, len(block.data)
            spans = [(0, end), (max(0, edge - 7), edge + 9), (5, end // 2), (edge, edge)]
            for start, stop in [*spans, (end - 3, end)]:
                into = bytearray(stop - start)
                source.read(rank, start, memoryview(into))
                assert into == block.data[start:stop]


def with_checksum(content: Any) -> bytes:
    """A manifest's file with this inner object, or this text of one."""
    raw = content if isinstance(content, bytes) else json.dumps(content, separators=(",", ":"))
    raw = raw if isinstance(raw, bytes) else raw.encode()
    return b'{"checksum":"%s","checkpoint":%s}\n' % (xxh3_64_hexdigest(raw).encode(), raw)


def with_changes(raw: bytes, **changes: object) -> bytes:
    """A manifest's file with other content, as forged."""
    return with_checksum(json.loads(raw)["checkpoint"] | changes)


def read_manifest(folder: Path | str) -> Manifest:
    return reader.read_manifest(open_store(str(folder)))


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def read_tensors(source: StateSource) -> dict[str, Tensor]:
    """All tensors of a source."""
    whole = WholeTensors(source)
    return {name: whole.read(name) for name in whole.tensors}


def assert_bit_identical(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compares names, shapes, dtypes and bytes."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert actual[name].shape == value.shape, name
        assert bytes_of(actual[name]) == bytes_of(value), name

"""Tensors in blocks of bytes at unaligned offsets, and read back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.checkpoint.export_model import WholeTensors
from rayzero.engine.layout.state_index import BlockIndex, LogicalTensor, StateSource, TensorRange
from rayzero.engine.precision.dtypes import dtype_name


class TensorBlocks:
    """A `StateSource` that holds tensors, each cut into `world` uneven parts, one a block."""

    def __init__(self, tensors: dict[str, Tensor], small: dict[str, Any], world: int = 3) -> None:
        self.step = int(small.get("step", 0))
        self.block_indexes: Sequence[BlockIndex] = [
            _table(tensors, rank, world) for rank in range(world)
        ]
        self.closed = False
        self._small = small
        self._blocks = [bytearray(table.nbytes) for table in self.block_indexes]
        for table, block in zip(self.block_indexes, self._blocks, strict=True):
            for one in table.ranges:
                raw = bytes_of(tensors[one.name].reshape(-1)[one.start : one.stop])
                block[one.offset : one.offset + len(raw)] = raw

    def metadata(self, rank: int) -> dict[str, Any]:
        return self._small

    def read(self, block: int, offset: int, into: memoryview) -> None:
        into[:] = self._blocks[block][offset : offset + len(into)]

    def close(self) -> None:
        self.closed = True


def _table(tensors: dict[str, Tensor], rank: int, world: int) -> BlockIndex:
    ranges, at = [], 0
    for name, tensor in tensors.items():
        # squares make the parts uneven, and the first of a small tensor empty
        start, stop = (tensor.numel() * edge**2 // world**2 for edge in (rank, rank + 1))
        if start < stop:
            ranges.append(TensorRange(name, start, stop, at))
            at += (stop - start) * tensor.itemsize + 3
    logical = {
        name: LogicalTensor(dtype_name(one.dtype), tuple(one.shape))
        for name, one in tensors.items()
        if any(part.name == name for part in ranges)
    }
    return BlockIndex(logical, tuple(ranges), at)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def whole_of(source: StateSource) -> dict[str, Tensor]:
    """All of a source's tensors."""
    whole = WholeTensors(source)
    return {name: whole.read(name) for name in whole.tensors}


def same(seen: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Bit by bit, names, shapes and dtypes included."""
    assert seen.keys() == right.keys()
    for name, value in right.items():
        assert seen[name].dtype == value.dtype, name
        assert seen[name].shape == value.shape, name
        assert bytes_of(seen[name]) == bytes_of(value), name

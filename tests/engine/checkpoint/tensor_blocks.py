"""Tensors in blocks of bytes at unaligned offsets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rayzero.engine.checkpoint.export_model import WholeTensors
from rayzero.engine.layout.state_index import BlockIndex, LogicalTensor, StateSource, TensorRange
from rayzero.engine.precision.dtypes import dtype_name


class TensorBlocks(StateSource):
    """A state source of tensors, each split unevenly over `world` blocks."""

    def __init__(
        self, tensors: dict[str, Tensor], metadata: dict[str, Any], world: int = 3
    ) -> None:
        self.step = int(metadata.get("step", 0))
        self.block_indexes = [_index(tensors, rank, world) for rank in range(world)]
        self.closed = False
        self._metadata = metadata
        self._blocks = [bytearray(index.nbytes) for index in self.block_indexes]
        for index, block in zip(self.block_indexes, self._blocks, strict=True):
            for part in index.ranges:
                raw = bytes_of(tensors[part.name].reshape(-1)[part.start : part.stop])
                block[part.offset : part.offset + len(raw)] = raw

    def metadata(self, rank: int) -> dict[str, Any]:
        return self._metadata

    def read(self, block: int, offset: int, into: memoryview) -> None:
        into[:] = self._blocks[block][offset : offset + len(into)]

    def close(self) -> None:
        self.closed = True


def _index(tensors: dict[str, Tensor], rank: int, world: int) -> BlockIndex:
    ranges, offset = [], 0
    for name, tensor in tensors.items():
        # squares make the parts uneven, and the first part of a small tensor empty
        start, stop = (tensor.numel() * edge**2 // world**2 for edge in (rank, rank + 1))
        if start < stop:
            ranges.append(TensorRange(name, start, stop, offset))
            offset += (stop - start) * tensor.itemsize + 3
    logical = {
        name: LogicalTensor(dtype_name(tensor.dtype), tuple(tensor.shape))
        for name, tensor in tensors.items()
        if any(part.name == name for part in ranges)
    }
    return BlockIndex(logical, tuple(ranges), offset)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def read_tensors(source: StateSource) -> dict[str, Tensor]:
    """All tensors of a source."""
    reader = WholeTensors(source)
    return {name: reader.read(name) for name in reader.tensors}


def assert_bit_identical(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compares names, shapes, dtypes and bytes."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert actual[name].shape == value.shape, name
        assert bytes_of(actual[name]) == bytes_of(value), name

"""StateSource, BlockIndex: what lies where in a block of bytes.

Where the ranges of logical tensors lie in one block of bytes: a slot, a file, a rank's memory.

A logical tensor is one of the training state's tensors as it is without any sharding, flattened:
`weights/<parameter>`, `optimizer.<key>/<parameter>`, `buffers/<name>`. Ranges are counted in its
elements, places in bytes. Nothing here knows stages, ranks or torch.

Where a training state can be read from: replicas' slots, a checkpoint's files, anything.

A state source that tells how much was read of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of an element, by dtype; the names are those of safetensors."""


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor's dtype (a key of `ITEM_BYTES`) and whole shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorRange:
    """Elements `start` to `stop` of a logical tensor, at byte `offset` of the block they lie in."""

    name: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class BlockIndex:
    """The contents of one block of bytes.

    Attributes:
        tensors: every logical tensor that a range is of.
        ranges: what lies where; ranges do not overlap in bytes.
        nbytes: the length of the block; bytes in no range are padding.
        constant_bytes: so many bytes at its beginning never change during a run.
    """

    tensors: dict[str, LogicalTensor] = field(default_factory=dict)
    ranges: tuple[TensorRange, ...] = ()
    nbytes: int = 0
    constant_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it; `from_json` is the way back."""
        return {
            "tensors": {name: [one.dtype, list(one.shape)] for name, one in self.tensors.items()},
            "ranges": [[one.name, one.start, one.stop, one.offset] for one in self.ranges],
            "nbytes": self.nbytes,
            "constant_bytes": self.constant_bytes,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> BlockIndex:
        return cls(
            {
                name: LogicalTensor(dtype, tuple(shape))
                for name, (dtype, shape) in document["tensors"].items()
            },
            tuple(TensorRange(*one) for one in document["ranges"]),
            document["nbytes"],
            document["constant_bytes"],
        )


class StateSource(Protocol):
    """A whole training state of one step, cut into blocks of bytes in any way."""

    @property
    def step(self) -> int:
        """Finished steps in the state."""

    @property
    def block_indexes(self) -> Sequence[BlockIndex]:
        """What each block holds. Blocks may overlap; together they hold everything."""

    def metadata(self, rank: int) -> dict[str, Any]:
        """The state's JSON part as that rank had it; another rank's when there was no such rank."""

    def read(self, block: int, offset: int, into: memoryview) -> None:
        """Fills `into` (bytes, writable) from byte `offset` of a block.

        Raises:
            DataError: those bytes are damaged or gone; it names the file or slot.
        """

    def close(self) -> None:
        """Lets go of what it reads from. Safe to repeat."""


class CountingSource:
    """`source`, with `progress` told the bytes of every read as it ends."""

    def __init__(self, source: StateSource, progress: Callable[[int], None]) -> None:
        self._source = source
        self._on_read = progress

    @property
    def step(self) -> int:
        return self._source.step

    @property
    def block_indexes(self) -> Sequence[BlockIndex]:
        return self._source.block_indexes

    def metadata(self, rank: int) -> dict[str, Any]:
        return self._source.metadata(rank)

    def read(self, block: int, offset: int, into: memoryview) -> None:
        self._source.read(block, offset, into)
        self._on_read(into.nbytes)

    def close(self) -> None:
        self._source.close()

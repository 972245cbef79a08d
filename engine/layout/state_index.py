"""Index of a block of bytes (a vault slot, a file, a rank's memory); sources of training state.

A logical tensor is a tensor of the training state as it would be without sharding, flattened:
`weights/<parameter>`, `optimizer.<key>/<parameter>`, `buffers/<name>`. Ranges are in elements,
offsets in bytes. Nothing here depends on stages, ranks or torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of an element by dtype name; names as in safetensors."""


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor's dtype (a key of `DTYPE_BYTES`) and full shape."""

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
    """Elements `start` to `stop` of a logical tensor, at byte `offset` of the block."""

    name: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class BlockIndex:
    """The contents of one block of bytes.

    Attributes:
        tensors: the logical tensors of all ranges.
        ranges: disjoint in bytes.
        nbytes: size of the block; bytes in no range are padding.
        constant_bytes: size of the beginning of the block that never changes during a run.
        weight_bytes: size of the beginning of the block that has all weights and buffers: first the
            constant ones, then the others. 0 in a checkpoint.
    """

    tensors: dict[str, LogicalTensor] = field(default_factory=dict)
    ranges: tuple[TensorRange, ...] = ()
    nbytes: int = 0
    constant_bytes: int = 0
    weight_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "tensors": {
                name: [tensor.dtype, list(tensor.shape)] for name, tensor in self.tensors.items()
            },
            "ranges": [[held.name, held.start, held.stop, held.offset] for held in self.ranges],
            "nbytes": self.nbytes,
            "constant_bytes": self.constant_bytes,
            "weight_bytes": self.weight_bytes,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> BlockIndex:
        return cls(
            {
                name: LogicalTensor(dtype, tuple(shape))
                for name, (dtype, shape) in document["tensors"].items()
            },
            tuple(TensorRange(*fields) for fields in document["ranges"]),
            document["nbytes"],
            document["constant_bytes"],
            document.get("weight_bytes", 0),
        )


class StateSource(ABC):
    """A complete training state of one step in blocks of bytes, however partitioned.

    Attributes:
        step: number of finished steps.
        block_indexes: index of each block. Blocks may overlap; together they hold the complete
            state.
    """

    step: int
    block_indexes: Sequence[BlockIndex]

    @abstractmethod
    def metadata(self, rank: int) -> dict[str, Any]:
        """Returns the JSON part of a rank; of another rank if the saved run had no such rank."""

    @abstractmethod
    def read(self, block: int, offset: int, into: memoryview) -> None:
        """Fills `into` (bytes, writable) from byte `offset` of a block. Raises DataError, which
        names the file or slot, if the bytes are damaged or missing."""

    def registered_block(self, block: int) -> memoryview | None:
        """Returns a block's bytes, not verified, if they are in host memory that is registered with
        the device; otherwise None."""
        return None

    def verify(self, block: int) -> None:  # noqa: B027
        """Raises DataError if the bytes of a registered block are damaged."""

    def tensor(self, block: int, offset: int, nbytes: int) -> Tensor | None:
        """Returns bytes of a block as a tensor view; None if `read` must be used. Called exactly
        once for each range that is read."""
        return None

    def take(
        self, ranges: tuple[TensorRange, ...], like: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        """Hands over a tensor of exactly these ranges, which the caller keeps; returns None if the
        source has no such tensor of the shape and device of `like`, and of `dtype`."""
        return None

    def close(self) -> None:  # noqa: B027  sources in memory have nothing to release
        """Releases files and memory. Idempotent."""

"""A training state that lies in tensors, usually views of mapped files, cut in any way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.errors import DataError
from rayzero.engine.state.parts import DTYPES
from rayzero.engine.state.table import LogicalTensor, Range, Table

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """A flat tensor and what of the state lies in it.

    Attributes:
        memory: 1-D and contiguous, in CPU memory.
        ranges: their offsets are counted in elements of `memory`.
        shapes: the whole shape of each logical tensor in it.
    """

    memory: Tensor
    ranges: Sequence[Range]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Piece:
        """One whole logical tensor."""
        shape = tuple(tensor.shape)
        return cls(tensor.reshape(-1), (Range(name, 0, tensor.numel(), 0),), {name: shape})

    def table(self) -> Table:
        dtype, size = dtype_name(self.memory.dtype, self.ranges[0].name), self.memory.itemsize
        return Table(
            {one.name: LogicalTensor(dtype, self.shapes[one.name]) for one in self.ranges},
            tuple(Range(one.name, one.start, one.stop, one.offset * size) for one in self.ranges),
            self.memory.nbytes,
        )


class TensorSource:
    """A `StateSource` of pieces, a block each.

    Attributes:
        step: finished steps in the state; 0 where the files do not say.
        has_optimizer: whether it holds more than weights and buffers. Where it does not, training
            starts a fresh optimizer on these weights.
    """

    def __init__(
        self, pieces: Sequence[Piece], small: dict[str, Any], *, has_optimizer: bool
    ) -> None:
        held = [piece for piece in pieces if piece.ranges]
        self.step = int(small["step"])
        self.has_optimizer = has_optimizer
        self.tables: Sequence[Table] = [piece.table() for piece in held]
        self._small = small
        self._memory = [piece.memory for piece in held]

    def small(self, rank: int) -> dict[str, Any]:
        """The same for every rank."""
        return self._small

    def read(self, block: int, offset: int, into: memoryview) -> None:
        raw = self._memory[block].view(torch.uint8).numpy()
        into[:] = raw[offset : offset + len(into)].data

    def close(self) -> None:
        self._memory.clear()

    def rename(self, names: Mapping[str, str | None]) -> None:
        """Gives logical tensors other names; those whose new name is None are left out."""
        self.tables = [_renamed(table, names) for table in self.tables]


def _renamed(table: Table, names: Mapping[str, str | None]) -> Table:
    new = {name: names.get(name, name) for name in table.tensors}
    return replace(
        table,
        tensors={name: table.tensors[old] for old, name in new.items() if name is not None},
        ranges=tuple(
            replace(one, name=name)
            for one in table.ranges
            for name in [new[one.name]]
            if name is not None
        ),
    )


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """The name that tables give a dtype.

    Raises:
        DataError: tables cannot hold it; it names the tensor.
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise DataError(f"{tensor} is of {dtype}", allowed=", ".join(str(one) for one in _NAMES))
    return name

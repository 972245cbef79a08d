"""Rows of blocks as samples, and as a batch without a Python object for each row.

A column of numbers, or of lists of numbers that are equally long, is an array: the rows of a
micro-batch are copied out of it once, into the batch. Imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from rayzero.engine.data.sampling import Integers

_TEXTS: dict[pa.DataType, tuple[Callable[[memoryview], Any], type[np.integer[Any]]]] = {
    pa.string(): (partial(str, encoding="utf-8"), np.int32),
    pa.large_string(): (partial(str, encoding="utf-8"), np.int64),
    pa.binary(): (bytes, np.int32),
    pa.large_binary(): (bytes, np.int64),
}
"""What makes a value of its bytes, and the type of the offsets."""


class BlockInMemory:
    """A block in memory.

    Attributes:
        arrays: views of its columns of numbers, lists of one length and tensors, by name.
        nbytes: the memory behind the table, which may use a part of it.
    """

    def __init__(self, table: pa.Table) -> None:
        # `take` would do it for every batch.
        is_split = any(column.num_chunks > 1 for column in table.columns)
        self.table = table.combine_chunks() if is_split else table
        self.nbytes = int(self.table.get_total_buffer_size())
        views = {name: _as_array(self.table[name]) for name in self.table.column_names}
        self.arrays = {name: view for name, view in views.items() if view is not None}


@dataclass(frozen=True)
class BlockRows:
    """Some rows of a block, and where they are in a micro-batch. Both int64, shape (rows,)."""

    block: BlockInMemory
    rows: Integers
    positions: Integers

    def samples(self) -> list[dict[str, Any]]:
        """A dict of each row's columns."""
        columns = {name: self.column(name) for name in self.block.table.column_names}
        return [{name: it[at] for name, it in columns.items()} for at in range(len(self.rows))]

    def column(self, name: str) -> list[Any]:
        """The values of a column, one a row."""
        if (array := self.block.arrays.get(name)) is None:
            return column_values(self.block.table[name], self.rows)
        values = array[self.rows]
        return values.tolist() if array.ndim == 1 else list(values)


class RowBatch(Sequence[dict[str, Any]]):
    """The samples of a micro-batch, of one or more blocks, made when one is asked for."""

    def __init__(self, parts: Sequence[BlockRows]) -> None:
        self._parts = parts
        self._samples: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return sum(len(part.rows) for part in self._parts)

    def __getitem__(self, index: Any) -> Any:
        if not self._samples:
            self._samples = self.place(part.samples() for part in self._parts)
        return self._samples[index]

    def collate(self) -> Any:
        """The batch that torch's `default_collate` makes of the samples."""
        names = self._parts[0].block.table.column_names
        if any(part.block.table.column_names != names for part in self._parts):
            return default_collate(list(self))
        return {name: self._collate_column(name) for name in names}

    def _collate_column(self, name: str) -> Any:
        arrays = [part.block.arrays.get(name) for part in self._parts]
        forms = {None if it is None else (it.dtype, it.shape[1:]) for it in arrays}
        if len(forms) > 1 or arrays[0] is None:
            return default_collate(self.place(part.column(name) for part in self._parts))
        batch = _allocate((len(self), *arrays[0].shape[1:]), arrays[0].dtype)
        for part in self._parts:
            array = part.block.arrays[name]
            first, last = int(part.positions[0]), int(part.positions[-1]) + 1
            if last - first == len(part.rows):
                # "clip", because "raise" copies twice; the rows were counted when they were read.
                np.take(array, part.rows, axis=0, out=batch[first:last], mode="clip")
            else:
                batch[part.positions] = array[part.rows]
        wide = {"i": np.int64, "u": np.int64, "f": np.float64}.get(batch.dtype.kind)
        is_number = batch.ndim == 1 and wide is not None  # of Python, where it is a sample's
        return torch.from_numpy(batch.astype(wide, copy=False) if is_number else batch)

    def place(self, values: Iterable[Sequence[Any]]) -> list[Any]:
        """The values of each part's rows, at their positions."""
        placed: list[Any] = [None] * len(self)
        for part, own in zip(self._parts, values, strict=True):
            for position, value in zip(part.positions.tolist(), own, strict=True):
                placed[position] = value
        return placed


def _allocate(shape: tuple[int, ...], kind: np.dtype[Any]) -> NDArray[Any]:
    """An array of Arrow's pool, which keeps what is freed for a next one: of malloc, the pages of
    each batch are new, which takes as long as filling them."""
    count = math.prod(shape)
    memory = pa.allocate_buffer(max(1, count * kind.itemsize))
    return np.frombuffer(memory, kind, count).reshape(shape)


def column_values(column: pa.ChunkedArray, rows: Integers) -> list[Any]:
    """Python values of some rows of a column; numpy arrays of lists of numbers."""
    kind = column.type
    if kind in _TEXTS and column.num_chunks == 1 and not column.null_count:
        # Copied once, out of the column: `take` would copy them before.
        make, offset_type = _TEXTS[kind]
        chunk = column.chunk(0)
        _, ends, content = chunk.buffers()
        offsets = np.frombuffer(ends, offset_type)[chunk.offset :]
        view = memoryview(content or b"")
        begins, ends = offsets[rows].tolist(), offsets[rows + 1].tolist()
        return [make(view[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    taken = column.take(pa.array(rows))
    if _has_numbers(kind):
        return [
            np.array(values.to_numpy(zero_copy_only=False))
            if (values := it.values) is not None and not values.null_count
            else it.as_py()
            for it in taken
        ]
    return taken.to_pylist()  # type: ignore[no-any-return]


def _as_array(column: pa.ChunkedArray) -> NDArray[Any] | None:
    """A view of a column of numbers, lists of one length or tensors; None of any other column, one
    with missing values or one in several chunks. Not writable."""
    kind = column.type
    if column.num_chunks != 1 or column.null_count:
        return None
    chunk = column.chunk(0)
    if isinstance(kind, pa.FixedShapeTensorType):
        return chunk.to_numpy_ndarray()  # type: ignore[no-any-return]
    if (pa.types.is_integer(kind) and kind != pa.uint64()) or pa.types.is_floating(kind):
        return chunk.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
    if not _has_numbers(kind) or not len(chunk):
        return None
    if not pa.types.is_fixed_size_list(kind):
        lengths = np.diff(chunk.offsets.to_numpy())
        if (lengths != lengths[0]).any():
            return None
    values = chunk.flatten()
    if values.null_count:
        return None
    return values.to_numpy(zero_copy_only=False).reshape(len(chunk), -1)  # type: ignore[no-any-return]


def _has_numbers(kind: pa.DataType) -> bool:
    """Whether these are lists of numbers."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list and not pa.types.is_fixed_size_list(kind):
        return False
    return bool(pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type))

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
"""By column type: the function that makes a value of its bytes, and the type of the offsets."""


class BlockInMemory:
    """A block in memory.

    Attributes:
        arrays: views of its columns of numbers, equally long lists of numbers, and tensors, by
            name.
        nbytes: the size of the table's buffers, of which it may use only a part.
    """

    def __init__(self, table: pa.Table) -> None:
        # Combined once here: `take` would combine the chunks for every batch.
        is_split = any(column.num_chunks > 1 for column in table.columns)
        self.table = table.combine_chunks() if is_split else table
        self.nbytes = int(self.table.get_total_buffer_size())
        views = {name: _as_array(self.table[name]) for name in self.table.column_names}
        self.arrays = {name: view for name, view in views.items() if view is not None}


@dataclass(frozen=True)
class BlockRows:
    """Some rows of a block, and their positions in a micro-batch. Both are int64, shape (rows,)."""

    block: BlockInMemory
    rows: Integers
    positions: Integers

    def samples(self) -> list[dict[str, Any]]:
        """Returns a dict of the columns of each row."""
        columns = {name: self.column(name) for name in self.block.table.column_names}
        return [
            {name: values[index] for name, values in columns.items()}
            for index in range(len(self.rows))
        ]

    def column(self, name: str) -> list[Any]:
        """Returns the values of a column, one for each row."""
        if (array := self.block.arrays.get(name)) is None:
            return column_values(self.block.table[name], self.rows)
        values = array[self.rows]
        return values.tolist() if array.ndim == 1 else list(values)


class RowBatch(Sequence[dict[str, Any]]):
    """The samples of a micro-batch, of one or more blocks. All are made when the first is used."""

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
        """Returns the batch that torch's `default_collate` makes of the samples."""
        names = self._parts[0].block.table.column_names
        if any(part.block.table.column_names != names for part in self._parts):
            return default_collate(list(self))
        return {name: self._collate_column(name) for name in names}

    def _collate_column(self, name: str) -> Any:
        arrays = [part.block.arrays.get(name) for part in self._parts]
        forms = {None if array is None else (array.dtype, array.shape[1:]) for array in arrays}
        if len(forms) > 1 or arrays[0] is None:
            return default_collate(self.place(part.column(name) for part in self._parts))
        batch = _allocate((len(self), *arrays[0].shape[1:]), arrays[0].dtype)
        for part in self._parts:
            array = part.block.arrays[name]
            first, last = int(part.positions[0]), int(part.positions[-1]) + 1
            if last - first == len(part.rows):
                # "clip", because "raise" copies twice; `BlockCache` has checked the block's rows.
                np.take(array, part.rows, axis=0, out=batch[first:last], mode="clip")
            else:
                batch[part.positions] = array[part.rows]
        wide = {"i": np.int64, "u": np.int64, "f": np.float64}.get(batch.dtype.kind)
        is_number = batch.ndim == 1 and wide is not None  # a Python number in a sample
        return torch.from_numpy(batch.astype(wide, copy=False) if is_number else batch)

    def place(self, values: Iterable[Sequence[Any]]) -> list[Any]:
        """Returns the values of each part's rows, at their positions."""
        placed: list[Any] = [None] * len(self)
        for part, part_values in zip(self._parts, values, strict=True):
            for position, value in zip(part.positions.tolist(), part_values, strict=True):
                placed[position] = value
        return placed


def _allocate(shape: tuple[int, ...], kind: np.dtype[Any]) -> NDArray[Any]:
    """Returns an uninitialized array in memory of Arrow's pool, which reuses freed memory. malloc
    would get new pages for each batch, which takes as long as filling them."""
    count = math.prod(shape)
    memory = pa.allocate_buffer(max(1, count * kind.itemsize))
    return np.frombuffer(memory, kind, count).reshape(shape)


def column_values(column: pa.ChunkedArray, rows: Integers) -> list[Any]:
    """Returns the Python values of some rows of a column; lists of numbers as numpy arrays."""
    kind = column.type
    if kind in _TEXTS and column.num_chunks == 1 and not column.null_count:
        # Each value is copied once, out of the column: `take` would copy it once more.
        make, offset_type = _TEXTS[kind]
        chunk = column.chunk(0)
        _, ends, content = chunk.buffers()
        offsets = np.frombuffer(ends, offset_type)[chunk.offset :]
        view = memoryview(content or b"")
        begins, ends = offsets[rows].tolist(), offsets[rows + 1].tolist()
        return [make(view[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    taken = column.take(pa.array(rows))
    if _has_numbers(kind):
        return [_list_value(scalar) for scalar in taken]
    return taken.to_pylist()  # type: ignore[no-any-return]


def _list_value(scalar: pa.Scalar) -> Any:
    """Returns a list of numbers as a new array; if it is missing or lacks a number, as Python."""
    values = scalar.values
    if values is None or values.null_count:
        return scalar.as_py()
    return np.array(values.to_numpy(zero_copy_only=False))


def _as_array(column: pa.ChunkedArray) -> NDArray[Any] | None:
    """Returns a read-only view of a column of numbers, equally long lists of numbers, or tensors;
    None for any other column, and if there are missing values or several chunks."""
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
    """Returns whether values of this type are lists of numbers."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list and not pa.types.is_fixed_size_list(kind):
        return False
    return bool(pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type))

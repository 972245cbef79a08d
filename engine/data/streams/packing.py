"""Packs documents of tokens into sequences of one length: blocks of sequences, made of blocks of
documents.

The documents of a sequence follow from the documents' lengths alone, which are read once and kept
in an index. So the number of sequences of a block is known before the block is read, and sequences
are read as other rows are: by position, at any number of workers.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from rayzero.engine.data.sampling import Integers
from rayzero.engine.data.streams.block import BlockSource, check_source
from rayzero.engine.data.streams.kept_tables import KeptTables
from rayzero.engine.errors import ConfigError, DataError, check_positive, is_number

Piece = tuple[int, int, int]  # of a document: (document, first token, end)
How = Literal["concatenate", "best_fit"]

IGNORED_LABEL = -100
"""The label of tokens that are not a target: torch's `cross_entropy` leaves them out."""


class PackedBlocks:
    """A source of sequences of a fixed number of tokens: one block for each block of documents.

    A row has three columns of `length` integers each: `input_ids`; `position_ids`, which begin
    again at 0 with each document, as in transformers' flattening collator, so that attention can be
    kept within documents (`cu_seqlens`); and `labels`, which are the tokens, but `IGNORED_LABEL` at
    the first token of a document and at padding. Padding is a document of its own.

    Args:
        documents: a source whose blocks have a column of lists of tokens.
        length: number of tokens of a sequence.
        column: the name of that column.
        how: "concatenate" cuts the documents of a block, one after another, into sequences, of
            which only the last one is padded. "best_fit" cuts only what is longer than a sequence,
            and puts each piece, longest first, into the sequence with the least room for it.
        index_dir: a folder or URL that keeps the lengths; without it each worker reads them at its
            start.
        threads: the most threads that read lengths.

    Raises:
        ConfigError: `length` is not positive, or `how` is unknown.
        DataError: the column is missing or has no lists of integers, or a block has no tokens.
    """

    def __init__(
        self,
        documents: BlockSource,
        length: int,
        column: str = "input_ids",
        how: How = "best_fit",
        pad_token: int = 0,
        index_dir: str | os.PathLike[str] | None = None,
        threads: int = 4,
    ) -> None:
        check_source(documents, "PackedBlocks()")
        check_positive("PackedBlocks()", length=length, threads=threads)
        if not is_number(pad_token, whole=True):
            raise ConfigError(
                f"pad_token of PackedBlocks() is {pad_token!r}", "a whole number", "set pad_token"
            )
        if how not in ("concatenate", "best_fit"):
            raise ConfigError(f"how is {how!r}", "'concatenate' or 'best_fit'")
        self.name = documents.name
        self._documents = documents
        self._length = length
        self._column = column
        self._pad = pad_token
        self._place = place_best_fit if how == "best_fit" else place_concatenated
        self._how = how
        self.describe = documents.describe
        self.fingerprint = f"{documents.fingerprint} packed: {how} {length} {column} {pad_token}"
        self._ends: Integers = np.cumsum(documents.counts)
        self._lengths, self.counts = self._load_or_read(index_dir, threads)

    def read(self, block: int) -> pa.Table:
        lists = self._token_lists(block)
        lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
        if not np.array_equal(lengths, self._block_lengths(block)):
            raise DataError(
                f"documents of {self.describe(block)} have other lengths than in the index",
                fix="remove the index, if the data may have changed",
            )
        tokens = lists.flatten().to_numpy(zero_copy_only=False)
        starts = np.cumsum(lengths) - lengths
        sequences = self._place(self._block_lengths(block), self._length)
        shape = (len(sequences), self._length)
        ids = np.full(shape, self._pad, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        positions = np.empty(shape, dtype=np.int64)
        for row, pieces in enumerate(sequences):
            offset = 0
            for document, begin, end in pieces:
                part = slice(offset, offset + end - begin)
                first = starts[document]
                ids[row, part] = tokens[first + begin : first + end]
                labels[row, offset + 1 : part.stop] = ids[row, offset + 1 : part.stop]
                positions[row, part] = np.arange(end - begin)
                offset = part.stop
            positions[row, offset:] = np.arange(self._length - offset)
        columns = {"input_ids": ids, "position_ids": positions, "labels": labels}
        return pa.table(
            {
                name: pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), self._length)
                for name, values in columns.items()
            }
        )

    def _block_lengths(self, block: int) -> Integers:
        begin = 0 if block == 0 else int(self._ends[block - 1])
        return self._lengths[begin : int(self._ends[block])]

    def _token_lists(self, block: int) -> pa.Array:
        table = self._documents.read(block)
        column = table[self._column] if self._column in table.column_names else None
        if column is None or not _is_list_of_integers(column.type):
            seen = f"columns {table.column_names}" if column is None else f"one of {column.type}"
            raise DataError(
                f"{self.describe(block)} has {seen}",
                f"a column {self._column!r} of lists of integers",
                "tokenize the documents, or set `column` of PackedBlocks()",
            )
        lists = column.combine_chunks()
        if lists.null_count:
            raise DataError(f"{lists.null_count} documents of {self.describe(block)} are missing")
        if missing := lists.flatten().null_count:  # numpy would make some number of each
            raise DataError(f"{missing} tokens of {self.describe(block)} are missing")
        return lists

    def _load_or_read(
        self, index_dir: str | os.PathLike[str] | None, threads: int
    ) -> tuple[Integers, Integers]:
        """Returns the lengths of all documents, block by block, and the number of sequences of each
        block. Adds to the index what it does not have. The index has a row for each block."""
        kept = None if index_dir is None else KeptTables(index_dir, "index_dir of PackedBlocks()")
        key = f"{self._documents.fingerprint} {self._column}"
        name = f"lengths-{xxhash.xxh3_128_hexdigest(key.encode())}.arrow"
        counts = f"{self._how} {self._length}"
        table = None if kept is None else kept.load(name)
        if table is None:
            blocks = range(len(self._documents.counts))
            with ThreadPoolExecutor(threads, "rayzero-lengths") as pool:
                found = list(pool.map(self._read_lengths, blocks))
            table = pa.table({"lengths": pa.array(found, pa.large_list(pa.int64()))})
        lengths = table["lengths"].combine_chunks().flatten().to_numpy()
        if counts not in table.column_names:
            parts = np.split(lengths, self._ends[:-1])
            sequences = [len(self._place(block_lengths, self._length)) for block_lengths in parts]
            table = table.append_column(counts, pa.array(sequences, pa.int64()))
            if kept is not None:
                kept.keep(name, table)
        return lengths, table[counts].to_numpy()

    def _read_lengths(self, block: int) -> Integers:
        lengths = self._token_lists(block).value_lengths().to_numpy(zero_copy_only=False)
        if not lengths.any():
            raise DataError(f"{self.describe(block)} has no tokens", fix="leave the block out")
        return lengths.astype(np.int64)  # type: ignore[no-any-return]


def _is_list_of_integers(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list and pa.types.is_integer(kind.value_type))


def place_concatenated(lengths: Integers, room: int) -> list[list[Piece]]:
    """Returns the pieces of each sequence of `room` tokens, of documents one after another."""
    sequences: list[list[Piece]] = []
    left = 0
    for document, length in enumerate(lengths.tolist()):
        begin = 0
        while begin < length:
            if not left:
                sequences.append([])
                left = room
            end = min(length, begin + left)
            sequences[-1].append((document, begin, end))
            left -= end - begin
            begin = end
    return sequences


def place_best_fit(lengths: Integers, room: int) -> list[list[Piece]]:
    """Returns the pieces of each sequence of `room` tokens, by best fit of the longest piece first
    (Ding et al. 2024, "Fewer Truncations Improve Language Modeling")."""
    pieces = [
        (document, begin, min(begin + room, length))
        for document, length in enumerate(lengths.tolist())
        for begin in range(0, length, room)
    ]
    pieces.sort(key=lambda piece: piece[1] - piece[2])  # stable: equally long ones in their order
    sequences: list[list[Piece]] = []
    by_room: defaultdict[int, list[int]] = defaultdict(list)  # sequences by the room in them
    rooms: list[int] = []  # the rooms for which there are sequences, ascending
    for piece in pieces:
        size = piece[2] - piece[1]
        index = bisect_left(rooms, size)
        if index == len(rooms):
            sequences.append([])
            number, left = len(sequences) - 1, room
        else:
            left = rooms[index]
            number = by_room[left].pop()
            if not by_room[left]:
                del rooms[index]
        sequences[number].append(piece)
        left -= size
        if left:
            if not by_room[left]:
                insort(rooms, left)
            by_room[left].append(number)
    return sequences


def cu_seqlens(position_ids: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
    """Returns where each document of a batch begins, then the end of the last one: the cumulative
    lengths that variable-length attention takes. The batch's sequences are taken one after another.
    `position_ids` may be a tensor in host memory, too."""
    flat = np.asarray(position_ids).reshape(-1)
    return np.append(np.flatnonzero(flat == 0), len(flat)).astype(np.int32)

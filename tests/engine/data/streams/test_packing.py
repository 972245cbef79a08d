"""Packing: every token once, documents apart, the best fit, the index of lengths."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rayzero.data
from rayzero.data import PackedBlocks, cu_seqlens
from rayzero.engine.data.streams.packing import place_best_fit, place_concatenated
from rayzero.engine.errors import ConfigError, DataError
from tests.engine.data.streams.memory import make_source, read_step

lengths = st.lists(st.integers(0, 25), min_size=1, max_size=30).filter(any)


class Documents:
    """Blocks of documents; every token is another number, from 1."""

    def __init__(self, blocks: list[list[int]]) -> None:
        self.name = "documents"
        self.counts = np.array([len(block) for block in blocks], dtype=np.int64)
        self.fingerprint = str(blocks)
        self.reads = 0
        tokens = iter(range(1, 10**6))
        self.tokens = [[[next(tokens) for _ in range(it)] for it in block] for block in blocks]

    def read(self, block: int) -> pa.Table:
        self.reads += 1
        return pa.table({"input_ids": pa.array(self.tokens[block], pa.list_(pa.int32()))})

    def describe(self, block: int) -> str:
        return f"documents {block}"


@given(st.lists(lengths, min_size=1, max_size=4), st.integers(1, 12), st.booleans())
def test_every_token_once_in_its_document(
    blocks: list[list[int]], length: int, best_fit: bool
) -> None:
    documents = Documents(blocks)
    how: Any = "best_fit" if best_fit else "concatenate"
    packed = PackedBlocks(documents, length, how=how)
    for block, own in enumerate(documents.tokens):
        table = packed.read(block)
        assert table.num_rows == packed.counts[block]
        ids, positions, labels = (
            np.array(table[name].to_pylist()) for name in ("input_ids", "position_ids", "labels")
        )
        assert ids.shape == (table.num_rows, length)
        assert sorted(ids[ids > 0].tolist()) == [token for it in own for token in it]
        document_of = {token: number for number, it in enumerate(own) for token in it}
        ends = cu_seqlens(positions)
        assert ends[0] == 0
        assert ends[-1] == ids.size
        for begin, end in pairwise(ends):
            piece, targets = ids.reshape(-1)[begin:end], labels.reshape(-1)[begin:end]
            assert positions.reshape(-1)[begin:end].tolist() == list(range(end - begin))
            assert targets[0] == -100
            if piece[0] == 0:
                assert not piece.any()
                assert (targets == -100).all()
            else:
                assert (np.diff(piece) == 1).all()
                assert len({document_of[token] for token in piece.tolist()}) == 1
                assert targets[1:].tolist() == piece[1:].tolist()


@given(lengths, st.integers(1, 12))
def test_concatenation_fills_all_but_the_last(lengths: list[int], room: int) -> None:
    sequences = place_concatenated(np.array(lengths), room)
    filled = [sum(end - begin for _, begin, end in it) for it in sequences]
    assert filled[:-1] == [room] * (len(filled) - 1)
    assert sum(filled) == sum(lengths)


@given(lengths, st.integers(1, 12))
def test_best_fit_is_that_of_a_plain_search(lengths: list[int], room: int) -> None:
    sizes = []
    for length in lengths:
        sizes += [room] * (length // room) + [length % room] * (length % room > 0)
    left: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [it for it in left if it >= size]
        if fitting:
            left.remove(min(fitting))
        left.append((min(fitting) if fitting else room) - size)
    sequences = place_best_fit(np.array(lengths), room)
    own = [room - sum(end - begin for _, begin, end in it) for it in sequences]
    assert sorted(own) == sorted(left)
    cut = {document for it in sequences for document, begin, _ in it if begin}
    assert all(lengths[document] > room for document in cut)


def test_lengths_are_read_once_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    documents, plain = Documents([[3, 4], [5, 9]]), PackedBlocks(Documents([[3, 4], [5, 9]]), 8)
    first = PackedBlocks(documents, 8, index_dir=tmp_path)
    assert documents.reads == 2
    again = PackedBlocks(documents, 8, how="concatenate", index_dir=tmp_path)
    for _ in range(2):
        assert PackedBlocks(documents, 8, index_dir=tmp_path).counts.tolist() == [1, 2]
    assert documents.reads == 2
    assert first.fingerprint != again.fingerprint
    assert first.read(1).equals(plain.read(1))
    (index,) = tmp_path.iterdir()
    changed = Documents([[3, 4], [5, 1]])
    PackedBlocks(changed, 8, index_dir=tmp_path)
    assert changed.reads == 2
    assert len([*tmp_path.iterdir()]) == 2
    index.write_bytes(b"damaged")
    documents.reads = 0
    PackedBlocks(documents, 8, index_dir=tmp_path)
    assert documents.reads == 2
    assert "is damaged: it is made again" in caplog.text
    with pytest.raises(DataError, match=r"index_dir of PackedBlocks\(\) cannot be used"):
        PackedBlocks(documents, 8, index_dir=index / "lengths")


def test_documents_that_changed_are_refused() -> None:
    documents = Documents([[3, 4]])
    packed = PackedBlocks(documents, 8)
    documents.tokens[0][1].append(7)
    with pytest.raises(DataError, match="documents 0 have other lengths"):
        packed.read(0)


def test_sequences_are_read_by_position_and_mixed() -> None:
    packed = PackedBlocks(Documents([[3, 4, 2], [5, 9], [8, 8, 1]]), 8)
    stream = rayzero.data.mix({"packed": (packed, 1)}, max_epochs={"packed": 1})
    length = int(packed.counts.sum())
    source = make_source(stream, length)
    samples = read_step(source, 0, length, 2, 2)
    tokens = np.concatenate([it["input_ids"] for it in samples])
    assert sorted(tokens[tokens > 0].tolist()) == list(range(1, 41))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"length": 0}, ConfigError, r"length of PackedBlocks\(\) is 0"),
        ({"length": 4, "pad_token": None}, ConfigError, "pad_token .* is None"),
        ({"length": 4, "how": "worst_fit"}, ConfigError, "'worst_fit'"),
        ({"length": 4, "column": "text"}, DataError, "has columns"),
    ],
)
def test_wrong_arguments_are_refused(options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        PackedBlocks(Documents([[3]]), **options)
    with pytest.raises(DataError, match="has no tokens"):
        PackedBlocks(Documents([[0]]), 4)


@pytest.mark.parametrize(
    ("first", "match"),
    [(None, "1 documents of documents 0"), ([4, None], "1 tokens of documents 0 are")],
)
def test_missing_documents_and_tokens_are_refused(first: Any, match: str) -> None:
    documents = Documents([[3, 2]])
    documents.tokens[0][0] = first
    with pytest.raises(DataError, match=match):
        PackedBlocks(documents, 4)

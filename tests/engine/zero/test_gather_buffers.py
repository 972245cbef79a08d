"""Assignment of blocks to gather buffers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rayzero.engine.layout.flat_layout import ParamSpec, make_layout
from rayzero.engine.zero.gather_buffers import Block, GatherBuffers
from rayzero.engine.zero.parameters import ShardedWeights


def make_block(name: str, *sizes: int, dtype: torch.dtype = torch.float32) -> Block:
    units = []
    for size in sizes:
        layout = make_layout(name, [ParamSpec("w", (size,))], 2)
        param = nn.Parameter(torch.zeros(size, dtype=dtype))
        units.append(ShardedWeights(layout, (param,), torch.zeros(layout.shard_numel, dtype=dtype)))
    return Block(name, nn.Linear(1, 1), units)


def make_buffers(*blocks: Block, count: int = 2, alone: Sequence[Block] = ()) -> GatherBuffers:
    buffers = GatherBuffers(blocks, count)
    buffers.assign(blocks, alone)
    return buffers


@given(st.lists(st.integers(0, 12), max_size=30), st.sets(st.integers(0, 12)), st.integers(2, 4))
def test_buffers_are_assigned_round_robin(
    numbers: list[int], alone_numbers: set[int], count: int
) -> None:
    blocks = [make_block(str(number), 1) for number in range(13)]
    order = [blocks[number] for number in numbers]
    alone = [blocks[number] for number in alone_numbers]
    GatherBuffers(blocks, count).assign(order, alone)
    assert all(block.buffer_index is None for block in alone)
    indices = [block.buffer_index for block in dict.fromkeys(order) if block not in alone]
    assert indices == [position % count for position in range(len(indices))]


def test_blocks_of_an_index_share_a_buffer_as_large_as_the_largest() -> None:
    a, b, c = make_block("a", 64), make_block("b", 320), make_block("c", 128)
    buffers = make_buffers(a, b, c)
    (for_a,), (for_b,) = buffers.acquire(a), buffers.acquire(b)
    assert (for_a.numel(), for_b.numel()) == (128, 320)
    assert (buffers.current_block(c), buffers.current_block(a)) == (a, None)
    assert buffers.acquire(c)[0] is for_a
    assert buffers.current_block(a) is c
    assert buffers.total_bytes == 4 * (128 + 320)
    buffers.assign([b, a], ())  # frees all
    assert buffers.total_bytes == 0
    assert buffers.current_block(b) is None
    assert (a.buffer_index, b.buffer_index) == (1, 0)
    buffers.acquire(a)
    buffers.clear()
    b.buffer_index = 1
    assert buffers.current_block(b) is None


def test_other_dtypes_do_not_share() -> None:
    a, b = make_block("a", 64), make_block("b", 64, dtype=torch.bfloat16)
    buffers = make_buffers(a, b, count=1)
    assert [buffers.acquire(it)[0].dtype for it in (a, b)] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("inference", [False, True])
def test_buffers_allocated_in_inference_mode_can_be_trained_with(inference: bool) -> None:
    block = make_block("a", 64)
    buffers = make_buffers(block)
    with torch.inference_mode(inference):
        (buffer,) = buffers.acquire(block)
    assert not buffer.is_inference()

"""Which block is gathered where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rayzero.engine.layout.flat_layout import ParamSpec, make_layout
from rayzero.engine.zero.gather_buffers import Block, GatherBuffers, assign_buffers
from rayzero.engine.zero.parameters import ShardedWeights

ORDERS = st.lists(st.integers(0, 12), max_size=30)


@given(ORDERS, st.sets(st.integers(0, 12)), st.integers(2, 4))
def test_blocks_take_turns_in_the_order_of_first_use(
    order: list[int], alone: set[int], count: int
) -> None:
    turns = assign_buffers(order, alone, count)
    first_uses = list(dict.fromkeys(order))
    assert list(turns) == first_uses
    assert {block for block, turn in turns.items() if turn is None} == alone & set(order)
    ring = [turns[block] for block in first_uses if block not in alone]
    assert ring == [number % count for number in range(len(ring))]
    # So any `count` blocks that follow one another are in different slots.
    assert all(len(set(ring[at : at + count])) == count for at in range(len(ring) - count + 1))


def make_block(name: str, *sizes: int, dtype: torch.dtype = torch.float32) -> Block:
    units = []
    for size in sizes:
        layout = make_layout(name, [ParamSpec("w", (size,))], 2)
        param = nn.Parameter(torch.zeros(size, dtype=dtype))
        units.append(ShardedWeights(layout, (param,), torch.zeros(layout.shard_numel, dtype=dtype)))
    return Block(name, nn.Linear(1, 1), tuple(units))


def make(*blocks: Block, turns: list[int | None], count: int = 2) -> GatherBuffers:
    slots = GatherBuffers(blocks, count)
    slots.set_assignment(dict(enumerate(turns)))
    return slots


def test_blocks_of_one_turn_share_a_buffer_as_long_as_the_longest() -> None:
    a, b, c = make_block("a", 64), make_block("b", 320), make_block("c", 128)
    slots = make(a, b, c, turns=[0, 1, 0])
    (for_a,), (for_b,) = slots.acquire(a), slots.acquire(b)
    assert for_a.numel() == 128
    assert for_b.numel() == 320
    assert slots.current_block(c) is a
    assert slots.current_block(a) is None
    assert slots.acquire(c)[0] is for_a
    assert slots.current_block(a) is c
    assert slots.total_bytes == 4 * (128 + 320)


def test_each_place_in_a_block_has_a_buffer_of_its_own() -> None:
    both, one = make_block("both", 64, 128), make_block("one", 192)
    slots = make(both, one, turns=[0, 0])
    first, second = slots.acquire(both)
    assert (first.numel(), second.numel()) == (192, 128)
    assert first.data_ptr() != second.data_ptr()
    assert len(slots.acquire(one)) == 1


def test_other_dtypes_do_not_share() -> None:
    a, b = make_block("a", 64), make_block("b", 64, dtype=torch.bfloat16)
    slots = make(a, b, turns=[0, 0])
    assert slots.acquire(a)[0].dtype is torch.float32
    assert slots.acquire(b)[0].dtype is torch.bfloat16


def test_a_block_alone_has_a_slot_of_its_own_for_good() -> None:
    a, b, c = make_block("a", 64), make_block("b", 320), make_block("c", 64)
    slots = make(a, b, c, turns=[None, None, 0])
    (for_a,) = slots.acquire(a)
    assert for_a.numel() == 64
    assert slots.current_block(a) is slots.current_block(b) is None
    assert slots.acquire(b)[0] is not for_a
    assert slots.acquire(a)[0] is for_a


def test_moving_out_leaves_the_slot_to_others() -> None:
    a, b = make_block("a", 64), make_block("b", 64)
    slots = make(a, b, turns=[0, 0])
    (shared,) = slots.acquire(a)
    slots.give_own_buffer(a)
    assert slots.current_block(b) is None
    assert slots.acquire(a)[0] is not shared
    assert slots.acquire(b)[0] is shared
    slots.give_own_buffer(a)  # a second time changes nothing
    assert slots.current_block(b) is None


def test_a_new_plan_starts_afresh() -> None:
    a, b = make_block("a", 64), make_block("b", 64)
    slots = make(a, b, turns=[0, 0])
    slots.acquire(a)
    slots.set_assignment({0: 1, 1: 0})
    assert slots.total_bytes == 0
    assert slots.current_block(b) is None
    assert (a.buffer_index, b.buffer_index) == (1, 0)
    slots.acquire(a)
    slots.clear()
    b.buffer_index = 1
    assert slots.current_block(b) is None


@pytest.mark.parametrize("inference", [False, True])
def test_buffers_can_be_trained_with_whatever_mode_made_them(inference: bool) -> None:
    block = make_block("a", 64)
    slots = make(block, turns=[0])
    with torch.inference_mode(inference):
        (buffer,) = slots.acquire(block)
    assert not buffer.is_inference()

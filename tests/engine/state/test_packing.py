"""The order of a block: what does not change, the other weights and buffers, the rest."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.layout.state_index import BlockIndex
from rayzero.engine.state.ranges import StateRange, pack_block, whole_tensor_range

KINDS = ["weights/", "buffers/", "optimizer.m/", "error_feedback/", "registered.0/"]
ENGINES = ["", "critic:"]


@st.composite
def parts(draw: st.DrawFn) -> list[StateRange]:
    made = []
    for number in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(KINDS))
        # A module's name may have the mark of engines in it.
        name = draw(st.sampled_from(ENGINES)) + kind + draw(st.sampled_from(["a", "m:weights/b"]))
        dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]))
        values = torch.full((draw(st.integers(1, 200)),), number + 1, dtype=dtype)
        part = whole_tensor_range(f"{name}{number}", values)
        is_constant = kind == "weights/" and draw(st.booleans())
        made.append(replace(part, constant=is_constant))
    return made


@given(parts())
def test_weights_are_at_the_beginning(ranges: list[StateRange]):
    block = pack_block(ranges)
    index = block.index
    by_name = {part.ranges[0].name: part for part in ranges}
    assert 0 <= index.constant_bytes <= index.weight_bytes <= index.nbytes
    for held in index.ranges:
        part = by_name[held.name]
        own = held.name.removeprefix("critic:")
        end = held.offset + part.memory.nbytes
        if part.constant:
            assert end <= index.constant_bytes
        elif own.startswith(("weights/", "buffers/")):
            assert index.constant_bytes <= held.offset < end <= index.weight_bytes
        else:
            assert index.weight_bytes <= held.offset < end <= index.nbytes
    spans = sorted((it.offset, it.offset + by_name[it.name].memory.nbytes) for it in index.ranges)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert BlockIndex.from_json(index.to_json()) == index


@given(parts())
def test_a_block_has_the_bytes_of_its_ranges(ranges: list[StateRange]):
    block = pack_block(ranges)
    memory = bytearray(block.index.nbytes)
    block.copy_to(memoryview(memory))
    by_name = {part.ranges[0].name: part.memory for part in ranges}
    for held in block.index.ranges:
        values = by_name[held.name]
        stored = memory[held.offset : held.offset + values.nbytes]
        assert bytes(stored) == bytes(values.view(torch.uint8).numpy())


@given(parts())
def test_each_kind_stays_in_its_order(ranges: list[StateRange]):
    names = [held.name for held in pack_block(ranges).index.ranges]
    for constant in (True, False):
        for is_weights in (True, False):
            kind = [it for it in ranges if (it.constant, it.is_weights) == (constant, is_weights)]
            kept = [part.ranges[0].name for part in kind]
            assert [name for name in names if name in kept] == kept

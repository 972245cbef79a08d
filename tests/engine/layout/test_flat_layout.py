"""Flat layout: every element has a unique offset, rank and group range."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.layout.flat_layout import ALIGN_NUMEL, ParamSpec, UnitLayout, make_layout

SHAPES = st.one_of(
    st.just(()),  # a scalar
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),  # empty ones among them
    st.tuples(st.integers(1, 3000)),
)
PARAMS = st.lists(st.tuples(SHAPES, st.integers(0, 2)), min_size=1, max_size=8)
WORLDS = st.integers(1, 9)


def make(params: list[tuple[tuple[int, ...], int]], world: int) -> UnitLayout:
    specs = [ParamSpec(f"p{i}", shape, group) for i, (shape, group) in enumerate(params)]
    return make_layout("unit", specs, world)


@st.composite
def layouts(draw: st.DrawFn) -> UnitLayout:
    return make(draw(PARAMS), draw(WORLDS))


def covered(parts: list[slice], length: int) -> bool:
    """Whether the parts cover 0 to `length` without overlap."""
    at = 0
    for part in sorted(parts, key=lambda part: (part.start, part.stop)):
        if part.start != at:
            return False
        at = part.stop
    return at == length


@given(layouts())
def test_parameters_and_padding_cover_the_buffer(layout: UnitLayout) -> None:
    extents = [layout.param_range(index) for index in range(len(layout.params))]
    filled = [extent for extent in extents if extent.start < extent.stop]
    assert covered([*filled, *layout.padding], layout.numel)
    assert all(gap.start < gap.stop for gap in layout.padding)
    assert [extent.stop - extent.start for extent in extents] == [p.numel for p in layout.params]
    padding = sum(gap.stop - gap.start for gap in layout.padding)
    assert padding == layout.numel - layout.logical_numel


@given(layouts())
def test_everything_is_aligned_and_padding_is_bounded(layout: UnitLayout) -> None:
    assert all(offset % ALIGN_NUMEL == 0 for offset in layout.offsets)
    assert layout.shard_numel % ALIGN_NUMEL == 0
    assert layout.numel == layout.shard_numel * layout.world_size
    limit = ALIGN_NUMEL * (len(layout.params) + layout.world_size)
    assert layout.numel - layout.logical_numel <= limit


@given(layouts())
def test_shards_contain_every_element_once(layout: UnitLayout) -> None:
    parts_of: dict[int, list[slice]] = {index: [] for index in range(len(layout.params))}
    shards = [layout.shard(rank) for rank in range(layout.world_size)]
    assert covered(shards, layout.numel)
    for shard in shards:
        assert shard.stop - shard.start == layout.shard_numel
        for part in layout.overlaps(shard):
            parts_of[part.index].append(slice(part.start, part.stop))
            # The offset of the part is within its parameter.
            start = shard.start + part.memory.start
            assert start == layout.param_range(part.index).start + part.start
            assert part.memory.stop - part.memory.start == part.stop - part.start > 0
            assert part.memory.stop <= layout.shard_numel
    for index, parts in parts_of.items():
        assert covered(parts, layout.params[index].numel)


@given(layouts(), st.data())
def test_group_ranges_cover_any_range(layout: UnitLayout, data: st.DataObject) -> None:
    edges = st.integers(0, layout.numel)
    start, stop = sorted((data.draw(edges), data.draw(edges)))
    group_parts = list(layout.group_ranges(slice(start, stop)))
    assert covered([part for _, part in group_parts], stop - start)
    assert len({group for group, _ in group_parts}) == len(group_parts)
    for group, part in group_parts:
        inside = range(start + part.start, start + part.stop)
        for index, spec in enumerate(layout.params):
            extent = layout.param_range(index)
            common = range(max(inside.start, extent.start), min(inside.stop, extent.stop))
            assert not len(common) or spec.group == group


@given(PARAMS, WORLDS)
def test_groups_are_contiguous_in_registration_order(
    params: list[tuple[tuple[int, ...], int]], world: int
) -> None:
    layout = make(params, world)
    names = [f"p{i}" for g in (0, 1, 2) for i, (_, group) in enumerate(params) if group == g]
    assert [spec.name for spec in layout.params] == names


@given(PARAMS)
def test_offsets_do_not_depend_on_the_world(params: list[tuple[tuple[int, ...], int]]) -> None:
    """Resharding then moves ranges without renumbering them."""
    assert len({make(params, world).offsets for world in range(1, 10)}) == 1

"""Order of streams: a bijection, exact for any range, local to windows; mixtures."""

from __future__ import annotations

from fractions import Fraction
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rayzero.data
from rayzero.engine.data.sampling import StepSplit, assign_step
from rayzero.engine.data.streams.mixture import Cycle, MixSchedule
from rayzero.engine.data.streams.order import BlockOrder, StreamOrder
from rayzero.engine.errors import ConfigError, DataError
from tests.engine.data.streams.memory import MemorySource, make_source

counts = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(counts, st.integers(-5, 2**70), st.integers(1, 6), st.integers(1, 17))
def test_each_epoch_has_each_row_once(
    counts: list[int], seed: int, window: int, group: int
) -> None:
    order = StreamOrder([BlockOrder(np.array(counts), seed, window, group)], None, group)
    rows = order.indices(0, 3 * order.length).reshape(3, -1)
    assert (np.sort(rows, axis=1) == np.arange(sum(counts))).all()


@given(counts, st.integers(1, 6), st.integers(1, 17), st.data())
def test_any_range_is_a_part_of_the_whole(
    counts: list[int], window: int, group: int, data: st.DataObject
) -> None:
    length = sum(counts)
    start = data.draw(st.integers(0, 2 * length))
    count = data.draw(st.integers(1, length))
    order = BlockOrder(np.array(counts), 3, window, group)
    whole = StreamOrder([order], None, group).indices(0, 3 * length + 1)
    part = StreamOrder([order], None, group).indices(start, count)
    assert part.tolist() == whole[start : start + count].tolist()


@given(counts, st.integers(1, 6), st.integers(1, 17))
def test_rows_stay_in_their_window(counts: list[int], window: int, group: int) -> None:
    """A group has rows of several windows only where one ends."""
    order = BlockOrder(np.array(counts), 5, window, group)
    number = 2 * order.length
    places = StreamOrder([order], None, group).places(0, number)
    windows = [order.window_of(int(turn)) for turn in places.turns]
    for begin in range(0, number - number % group, group):
        turns, _, _ = order.locate(np.arange(begin, begin + group))
        assert sorted(windows[begin : begin + group]) == sorted(map(order.window_of, turns))
    ends = np.array([max(windows[: it + 1]) for it in range(0, number, group)])
    assert (ends <= np.array([min(windows[it:]) for it in range(0, number, group)]) + window).all()
    for found in set(windows):
        blocks = {int(places.blocks[it]) for it in range(number) if windows[it] == found}
        assert set(order.blocks_of_window(found, 0.0, 1.0)) == blocks
        assert len(blocks) <= window


@pytest.mark.parametrize("counts", [np.full(64, 1000), np.arange(64) * 20 + 500])
@pytest.mark.parametrize("batch", [256, 100])
def test_only_blocks_at_the_ends_of_shares_are_read_twice(counts: Any, batch: int) -> None:
    """By two ranks, over an epoch and the windows that steps cross; and all that is read is planned
    and no more."""
    order = BlockOrder(counts, 1, 16, batch)
    stream = StreamOrder([order], None, batch)
    reads = 0
    for begin in (0, batch // 2):
        blocks = {
            int(block)
            for step in range(order.length // batch)
            for block in stream.places(step * batch + begin, batch // 2).blocks
        }
        share = (begin / batch, begin / batch + 0.5)
        assert blocks == {
            it for window in range(4) for it in order.blocks_of_window(window, *share)
        }
        reads += len(blocks)
    assert reads <= 64 + 4  # one a window


def test_a_step_has_its_share_of_each_block_and_of_a_source_whose_weight_changed() -> None:
    order = BlockOrder(np.full(32, 1000), 1, 16, 128)
    for count, allowed in ((128, 1), (90, 4), (200, 4)):  # the last two: after a change of weights
        for step in range(20):
            _, blocks, _ = order.locate(np.arange(step * count, (step + 1) * count))
            numbers = np.bincount(blocks, minlength=32)
            assert np.abs(numbers[numbers > 0] - count / 16).max() <= allowed


def test_rows_of_a_stratum_are_mixed() -> None:
    """The rows of each step that are a rank's first: all of a stratum, in a random order."""
    order = BlockOrder(np.full(16, 1024), 1, 16, 64)
    stream = StreamOrder([order], None, 64)
    rows = np.array([stream.places(step * 64, 1).rows[0] for step in range(256)])
    assert sorted(rows.tolist()) == list(range(rows.min(), rows.min() + 256))
    assert abs(np.corrcoef(np.arange(256), rows)[0, 1]) < 0.3


def test_epochs_windows_and_seeds_differ() -> None:
    order = StreamOrder([BlockOrder(np.full(8, 50), 1, 2, 1)], None, 1)
    other = StreamOrder([BlockOrder(np.full(8, 50), 2, 2, 1)], None, 1)
    first, second = order.indices(0, 800).reshape(2, -1)
    assert (first != second).mean() > 0.9
    assert (first != other.indices(0, 400)).mean() > 0.9
    assert (first[:100] % 50 != first[100:200] % 50).mean() > 0.9


class Synthetic(MemorySource):
    """A million blocks of 700 rows."""

    def __init__(self) -> None:
        super().__init__([1])
        self.counts = np.full(10**6, 700)


def test_resume_in_a_million_blocks_is_fast() -> None:
    memory, part = Synthetic(), assign_step(1024, 1, 0, 1024)[0]
    since_s = perf_counter()
    source = make_source(rayzero.data.stream(memory), 1024, cursor=10**9)
    source.begin(10**9, StepSplit((part,)), lambda: None)
    rows, _ = source.read(10**9, part, is_last=True, check=lambda: None)
    assert perf_counter() - since_s < 30  # 1 s, on a machine thirty times slower
    assert len(set(rows)) == 1024
    assert len(memory.reads) <= 2 * 16, "of the current window and the next one"


@pytest.mark.parametrize("bad", [[], [3, 0]])
def test_sources_without_rows_are_refused(bad: list[int]) -> None:
    with pytest.raises(DataError, match="with one row or more"):
        BlockOrder(np.array(bad, dtype=np.int64), 0, 4, 1)


weights = st.lists(
    st.one_of(st.integers(0, 9), st.sampled_from([0.1, 0.25, 0.7, 1 / 3, 1e-2])),
    min_size=1,
    max_size=6,
).filter(any)


@settings(max_examples=40)
@given(weights)
def test_shares_are_exact_at_every_prefix(weights: list[float]) -> None:
    cycle = Cycle(weights)
    number = min(2 * cycle.period + 3, 5000)
    sources, ranks = cycle.split(np.arange(number))
    seen = np.zeros(len(weights), dtype=int)
    for position in range(number):
        assert cycle.counts(position).tolist() == seen.tolist() or position % 97
        assert ranks[position] == seen[sources[position]]
        seen[sources[position]] += 1
        for source, share in enumerate(cycle.shares.tolist()):
            assert abs(seen[source] - Fraction((position + 1) * share, cycle.period)) < 1
    for source, weight in enumerate(weights):
        assert cycle.shares[source] / cycle.period == pytest.approx(
            weight / sum(weights), abs=2**-16
        )


@settings(max_examples=60)
@given(st.data())
def test_mixtures_change_weights_and_end_at_limits(data: st.DataObject) -> None:
    """Against a plain walk that counts."""
    number = data.draw(st.integers(1, 4))
    positive = st.tuples(*[st.integers(1, 5)] * number)
    changes = {0: data.draw(positive), **data.draw(st.dictionaries(st.integers(1, 60), positive))}
    limits = data.draw(st.tuples(*[st.one_of(st.none(), st.integers(1, 30))] * number))
    schedule = MixSchedule([10] * number, changes, limits)
    sources, own = schedule.split(0, 200)
    ends = None not in limits
    assert schedule.length == (sum(limits) if ends else 10 * number)
    seen = [0] * number
    for position in range(min(200, schedule.length) if ends else 200):
        source = int(sources[position])
        assert own[position] == seen[source]
        seen[source] += 1
        assert limits[source] is None or seen[source] <= limits[source]
    if ends and schedule.length <= 200:
        assert seen == list(limits)
    start = data.draw(st.integers(0, 199))
    part = schedule.split(start, 200 - start)
    assert part[0].tolist() == sources[start:].tolist()
    assert part[1].tolist() == own[start:].tolist()
    for source in range(number):  # over the epochs of the mixture, too
        mine = own[sources == source]
        assert mine.tolist() == list(range(len(mine)))


def test_a_changed_weight_holds_from_its_position() -> None:
    sources, _ = MixSchedule([100, 100], {0: (1, 1), 10: (1, 4)}, (None, None)).split(0, 60)
    assert np.bincount(sources[:10]).tolist() == [5, 5]
    assert np.bincount(sources[10:]).tolist() == [10, 40]


@pytest.mark.parametrize("bad", [(0, 0), (1, -1), (1, 1e-9), ()])
def test_bad_weights_are_refused(bad: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="weight"):
        Cycle(bad)

"""Numbers that are added up as they come are what they are when added up at the end."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator import progress
from rayzero.orchestrator.progress import RowAggregator

ROWS = st.lists(st.dictionaries(st.sampled_from("abcd"), st.floats(-1e6, 1e6)), max_size=20)


@given(ROWS, st.integers(1, 5))
def test_sums_and_extremes_of_rows_of_any_shape(rows: list[dict[str, float]], fold: int):
    with patch.object(progress, "FOLD_ROWS", fold):
        found = RowAggregator()
        for row in rows:
            found.add_row(row)
        by_name = {name: [row[name] for row in rows if name in row] for name in "abcd"}
        by_name = {name: values for name, values in by_name.items() if values}
        assert found.maxima() == {name: max(values) for name, values in by_name.items()}
        means = {name: sum(values) / len(values) for name, values in by_name.items()}
        assert found.means() == pytest.approx(means, abs=1e-6)
        everywhere = {name: min(v) for name, v in by_name.items() if len(v) == len(rows)}
        assert found.minima(len(rows)) == everywhere


def test_the_last_row_costs_no_more_than_the_others():
    class Counted(dict[str, float]):
        """Counts how often it is read."""

        reads = 0

        def values(self) -> Iterator[float]:  # type: ignore[override]
            Counted.reads += 1
            return iter(super().values())

    found = RowAggregator()
    for rank in range(1000):
        found.add_row(Counted(loss=float(rank)))
    assert Counted.reads == 1000
    assert found.maxima() == {"loss": 999.0}
    assert Counted.reads == 1000

"""What thousands of rows of named numbers add up to, at about a microsecond a row. Pure."""

from __future__ import annotations

from collections.abc import Mapping

FOLD = 256
"""Rows that are added up at once: so the last row of all costs no more than any other."""


class _Block:
    """Rows with the same names in the same order, which is what nearly all ranks report."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.values: list[float] = []
        self.most = FOLD * len(names)


class Columns:
    """Sums and extremes by name. Rows are only gathered; now and then they are added up in C."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, ...], _Block] = {}
        self._last = _Block(())
        self._counts: dict[str, int] = {}
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._minima: dict[str, float] = {}

    def add(self, row: Mapping[str, float]) -> None:
        """One more row."""
        names, block = tuple(row), self._last
        if names != block.names:
            block = self._last = self._blocks.setdefault(names, _Block(names))
        block.values += row.values()
        if len(block.values) >= block.most:
            self._fold(block)

    def maxima(self) -> Mapping[str, float]:
        """The largest value under each name."""
        self._fold_all()
        return self._maxima

    def minima(self, rows: int) -> dict[str, float]:
        """The smallest value under each name that so many rows have."""
        self._fold_all()
        return {name: least for name, least in self._minima.items() if self._counts[name] == rows}

    def means(self) -> dict[str, float]:
        """The mean under each name, over the rows that have it."""
        self._fold_all()
        return {name: total / self._counts[name] for name, total in self._sums.items()}

    def _fold_all(self) -> None:
        for block in self._blocks.values():
            if block.values:
                self._fold(block)

    def _fold(self, block: _Block) -> None:
        values, width = block.values, len(block.names)
        for place, name in enumerate(block.names):
            column = values[place::width]
            self._counts[name] = self._counts.get(name, 0) + len(column)
            self._sums[name] = self._sums.get(name, 0.0) + sum(column)
            self._maxima[name] = max(self._maxima.get(name, column[0]), max(column))
            self._minima[name] = min(self._minima.get(name, column[0]), min(column))
        values.clear()

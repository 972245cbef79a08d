"""Covering arrays: few rows that contain every t-way combination of axis values.

Nearly all combination failures are triggered by two or three interacting values (Kuhn, Wallace,
Gallo 2004), so the full cross product of many axes is not worth its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

Row = dict[str, Any]
Axes = Mapping[str, Sequence[Any]]
Combination = tuple[tuple[str, Any], ...]
CANDIDATES = 100


def _allow_all(row: Row) -> bool:
    return True


def list_combinations(
    axes: Axes, strength: int, allowed: Callable[[Row], bool]
) -> list[Combination]:
    """Every allowed combination of values of `strength` axes.

    Args:
        allowed: predicate over rows; also called with partial rows.
    """
    return [
        combination
        for names in combinations(axes, strength)
        for values in product(*(axes[name] for name in names))
        if allowed(dict(combination := tuple(zip(names, values, strict=True))))
    ]


def covering(
    axes: Axes,
    strength: int,
    allowed: Callable[[Row], bool] = _allow_all,
    seed: int = 0,
) -> list[Row]:
    """Rows that cover every allowed combination. Deterministic for a given seed.

    Greedy: each row starts from the first uncovered combination; of `CANDIDATES` random completions
    the one that covers the most uncovered combinations is kept.
    """
    random, rows = Random(seed), []
    # a dict, not a set: iteration order is deterministic
    uncovered = dict.fromkeys(list_combinations(axes, strength, allowed))
    while uncovered:
        first = next(iter(uncovered))
        candidates = [_complete(first, axes, allowed, random) for _ in range(CANDIDATES)]
        best = max(
            candidates, key=lambda row: sum(c in uncovered for c in _combinations_of(row, strength))
        )
        for combination in _combinations_of(best, strength):
            uncovered.pop(combination, None)
        rows.append(best)
    return rows


def _complete(
    start: Combination, axes: Axes, allowed: Callable[[Row], bool], random: Random
) -> Row:
    while True:
        row = dict(start)
        for name, values in axes.items():
            if name not in row:
                possible = [value for value in values if allowed(row | {name: value})]
                row[name] = random.choice(possible or values)
        if allowed(row):
            return {name: row[name] for name in axes}


def _combinations_of(row: Row, strength: int) -> list[Combination]:
    return list(combinations(row.items(), strength))

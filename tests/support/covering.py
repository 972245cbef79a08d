"""Few rows in which every few values of different axes meet: a covering array.

What goes wrong in a combination goes wrong, nearly always, where two or three of its choices meet
(Kuhn, Wallace, Gallo 2004), so the whole product of many axes is not worth its price.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

Row = dict[str, Any]
Axes = Mapping[str, Sequence[Any]]
Meeting = tuple[tuple[str, Any], ...]
TRIES = 30


def _any(row: Row) -> bool:
    return True


def meetings(axes: Axes, strength: int, allowed: Callable[[Row], bool]) -> list[Meeting]:
    """Every choice of values on `strength` axes that a row may have.

    Args:
        allowed: whether a row may be; it is asked about parts of rows too.
    """
    return [
        meeting
        for names in combinations(axes, strength)
        for values in product(*(axes[name] for name in names))
        if allowed(dict(meeting := tuple(zip(names, values, strict=True))))
    ]


def covering(
    axes: Axes, strength: int, allowed: Callable[[Row], bool] = _any, seed: int = 0
) -> list[Row]:
    """Rows that have all meetings, the same ones every time.

    Greedy: a row begins with the first meeting that is missing; of `TRIES` ways to fill it up by
    chance, the one with the most missing meetings is taken.
    """
    random, rows = Random(seed), []
    left = dict.fromkeys(meetings(axes, strength, allowed))  # in order, as a set would not be
    while left:
        first = next(iter(left))
        tries = [_filled(first, axes, allowed, random) for _ in range(TRIES)]
        best = max(tries, key=lambda row: sum(one in left for one in _of(row, strength)))
        for one in _of(best, strength):
            left.pop(one, None)
        rows.append(best)
    return rows


def _filled(start: Meeting, axes: Axes, allowed: Callable[[Row], bool], random: Random) -> Row:
    while True:
        row = {name: random.choice(values) for name, values in axes.items()} | dict(start)
        if allowed(row):
            return row


def _of(row: Row, strength: int) -> list[Meeting]:
    return list(combinations(row.items(), strength))

"""Numbers and curves in the few characters of a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def printable_text(text: object) -> str:
    """In one line, and without what a terminal would obey."""
    return "".join(one if one.isprintable() else " " for one in str(text))


def format_duration(seconds: float | None) -> str:
    """`1 h 5 min`, in its two largest units; `-` where nobody knows."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{max(0.0, seconds) * 1e3:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = ((days, "d"), (hours, "h"), (minutes, "min"), (rest, "s"))
    first = next(at for at, (many, _) in enumerate(parts) if many)
    return " ".join(f"{many} {unit}" for many, unit in parts[first : first + 2] if many)


def format_size(nbytes: float | None) -> str:
    """`1.8 GiB`"""
    if nbytes is None:
        return "-"
    at = 0
    while nbytes >= 1024 and at < len(_UNITS) - 1:
        nbytes, at = nbytes / 1024, at + 1
    return f"{nbytes:.3g} {_UNITS[at]}" if nbytes < 1000 else f"{nbytes:.0f} {_UNITS[at]}"


def format_number(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """A curve as blocks, one a column: the mean of what falls into it, blank for nothing known."""
    cells = [_mean_known(cell) for cell in _split_cells(values, width)]
    known = [value for value in cells if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    return "".join(" " if value is None else _block_char(value - low, span) for value in cells)


def split_width(values: Sequence[float], width: int) -> list[int]:
    """How many of `width` columns each value gets; together exactly those, if there are values."""
    whole = sum(values)
    if whole <= 0:
        return [0] * len(values)
    exact = [value / whole * width for value in values]
    given = [int(one) for one in exact]
    by_rest = sorted(range(len(values)), key=lambda at: given[at] - exact[at])
    for at in by_rest[: width - sum(given)]:
        given[at] += 1
    return given


def _split_cells(values: Sequence[float | None], width: int) -> list[Sequence[float | None]]:
    columns = min(width, len(values))
    edges = [len(values) * at // columns for at in range(columns + 1)] if columns else []
    return [values[start:stop] for start, stop in pairwise(edges)]


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _block_char(above: float, span: float) -> str:
    return BLOCKS[round(above / span * (len(BLOCKS) - 1)) if span else 0]

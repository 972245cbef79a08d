"""Numbers, durations and curves as short text."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def printable_text(text: object) -> str:
    """Returns the text in one line, without control characters."""
    return "".join(char if char.isprintable() else " " for char in str(text))


def format_duration(seconds: float | None) -> str:
    """Returns a duration in its two largest units, such as `1 h 5 min`; `-` if it is unknown."""
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
    first = next(index for index, (amount, _) in enumerate(parts) if amount)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[first : first + 2] if amount)


def format_time(unix_s: float) -> str:
    """Returns a time in this machine's time zone, such as `2026-11-22 14:30:05 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(unix_s))


def format_size(nbytes: float | None) -> str:
    """Returns a size such as `1.8 GiB`; `-` if it is unknown."""
    if nbytes is None:
        return "-"
    power = 0
    while nbytes >= 1024 and power < len(_UNITS) - 1:
        nbytes, power = nbytes / 1024, power + 1
    return f"{nbytes:.3g} {_UNITS[power]}" if nbytes < 1000 else f"{nbytes:.0f} {_UNITS[power]}"


def cut_text(text: str, width: int) -> str:
    """Cuts a line to at most `width` characters, the last one `…` if there were more."""
    return text if len(text) <= width else f"{text[: max(0, width - 1)].rstrip()}…"


def table_lines(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> Iterator[str]:
    """Yields rows with aligned columns. Columns are right-aligned, except the last one and those in
    `left`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {*left, len(widths) - 1}
    for row in rows:
        cells = (
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def count_of(number: int, noun: str) -> str:
    """Returns a number with its noun, such as `1 fault` or `1,200 faults`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_number(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Returns a curve as block characters. Each is the mean of the values in its column; blank if
    none is known."""
    columns = min(width, len(values))
    edges = [len(values) * index // columns for index in range(columns + 1)] if columns else []
    largest = max((abs(value) for value in values if value is not None), default=0.0) or 1.0
    shares = [None if value is None else value / largest for value in values]  # sums stay finite
    cells = [_mean_known(shares[start:stop]) for start, stop in pairwise(edges)]
    numbers = [value for value in cells if value is not None]
    if not numbers:
        return ""
    low, span = min(numbers), (max(numbers) - min(numbers)) or 1.0
    top = len(BLOCKS) - 1
    return "".join(
        " " if cell is None else BLOCKS[round((cell - low) / span * top)] for cell in cells
    )


def split_width(values: Sequence[float], width: int) -> list[int]:
    """Returns how many columns each value gets, in proportion. They add up to `width` unless all
    values are 0."""
    total = sum(values)
    if total <= 0:
        return [0] * len(values)
    exact = [value / total * width for value in values]
    columns = [int(share) for share in exact]
    by_remainder = sorted(range(len(values)), key=lambda index: columns[index] - exact[index])
    for index in by_remainder[: width - sum(columns)]:
        columns[index] += 1
    return columns


def _mean_known(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def plain_class(name: str) -> str:
    """Returns a readable name of a memory class of `engine.accounting`. Metrics and files keep the
    class's own name."""
    prefix = next((place for place in ("host_", "disk_") if name.startswith(place)), "")
    words = {"slots": "gather buffers", "grad_slots": "gradient buffers"}
    own = name.removeprefix(prefix)
    return f"{prefix}{words.get(own, own)}".replace("_", " ")

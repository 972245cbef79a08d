"""A job's curves, and the table of all jobs, as CSV (RFC 4180)."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import Any

CONTENT_TYPE = "text/csv; charset=utf-8"

_JOB_COLUMNS = (
    *("name", "state", "error", "began_s", "at_s", "wall_s", "stage", "world_size", "step"),
    *("steps", "loss", "samples_per_s", "tokens_per_s", "step_s", "cpu_cores"),
    *("gpu_utilization", "goodput", "faults"),
)

Row = Mapping[str, Any]


def steps_csv(history: Mapping[str, Any]) -> tuple[str, bytes]:
    """(content type, body) of the curves in /history.json: a column for each, a line for each step
    at which a row of one begins. A curve whose rows have several steps has the columns NAME_min and
    NAME_max as well: its own is the mean."""
    lines: dict[int, dict[str, Any]] = {}
    columns: dict[str, None] = {"step": None, "elapsed_s": None}
    for name, rows in history["curves"].items():
        of_several = any(len(row) > 2 for row in rows)
        names = (name, f"{name}_min", f"{name}_max") if of_several else (name,)
        columns |= dict.fromkeys(names)
        for step, *values in rows:
            line = lines.setdefault(step, {"step": step})
            of_names = values[:3] if len(values) > 1 else values * 3
            numbers = ("nan" if value is None else value for value in of_names)
            line.update(zip(names, numbers, strict=False))
    return _encode(columns, (lines[step] for step in sorted(lines)))


def jobs_csv(rows: Sequence[Row]) -> tuple[str, bytes]:
    """(content type, body) of the rows in /jobs.json: a column for each value, and for each key of
    their config."""
    keys = {key: None for row in rows for key in row["config"]}
    return _encode([*_JOB_COLUMNS, *keys], ({**row, **row["config"]} for row in rows))


def _encode(columns: Iterable[str], rows: Iterable[Row]) -> tuple[str, bytes]:
    """Unknown values are empty."""
    text = StringIO()
    writer = csv.DictWriter(text, list(columns), extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return CONTENT_TYPE, text.getvalue().encode()

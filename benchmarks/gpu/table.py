"""Prints a run: what is wrong first, then a line for each stage, then the values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.runner import is_red, summary


def format_run(document: dict[str, Any]) -> str:
    return "\n".join(_lines(document))


def _lines(document: dict[str, Any]) -> Iterator[str]:
    results = document["stages"]
    red = [result for result in results if is_red(result)]
    wrong = [result for result in red if result["correctness"]]
    if wrong:
        yield "NOT CORRECT: " + ", ".join(result["name"] for result in wrong)
    others = [result["name"] for result in red if not result["correctness"]]
    if others:
        yield "NOT MEASURED, or not as expected: " + ", ".join(others)
    for result in red:
        yield from _failures(result)
    if document.get("dry_run"):
        yield "A dry run with small shapes on a CPU: the script works; its times mean nothing."
    yield ""
    for number, result in enumerate(results, start=1):
        yield f"{number:>2} {result['name']:<14}{summary(result)}"
    yield ""
    for result in results:
        if result["values"] or result["skipped"]:
            yield f"{result['name']}: {result['title']}"
            yield from _values(result["values"])
            for part in result["skipped"]:
                yield f"   {part['name']}: not run: {part['reason']}"


def _values(values: dict[str, Any]) -> Iterator[str]:
    """A line each; records of the same kind, such as the systems of the comparison, as columns."""
    rows = {name: value for name, value in values.items() if _is_row(value)}
    width = max((len(name) for name in values), default=0)
    for name, value in values.items():
        if name not in rows:
            yield f"   {name:<{width}}  {_format(value)}"
    if rows:
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        yield "   " + " " * width + "".join(f"{column:>17}" for column in columns)
        for name, row in rows.items():
            cells = (_format(row[it]) if it in row else "-" for it in columns)
            yield f"   {name:<{width}}" + "".join(f"{cell:>17}" for cell in cells)


def _is_row(value: Any) -> bool:
    return isinstance(value, dict) and "median_s" in value


def _failures(result: dict[str, Any]) -> Iterator[str]:
    if result["error"]:
        yield f"   {result['name']}: {result['error']}"
        yield from (f"      | {line}" for line in result["output_tail"].splitlines()[-6:])
    for check in result["checks"]:
        if not check["passed"]:
            where = f"{result['name']}: {check['name']}"
            yield f"   {where}: {check['seen']}; expected {check['expected']}"


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(_format(item) for item in value)
    return str(value)

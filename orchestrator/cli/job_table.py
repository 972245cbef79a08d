"""The table of `rayzero ls`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from shutil import get_terminal_size

from rayzero.orchestrator.machine import State
from rayzero.orchestrator.results import JobStatus
from rayzero.orchestrator.top.format import (
    cut_text,
    format_duration,
    format_number,
    printable_text,
    table_lines,
)

PLAIN_WIDTH = 140
"""Columns where no terminal has a width."""

_HEADS = ("name", "state", "workers", "age", "step", "loss", "")


def output_width() -> int:
    """Columns of the terminal; of a pipe or a file `PLAIN_WIDTH`."""
    return get_terminal_size().columns if sys.stdout.isatty() else PLAIN_WIDTH


def job_table(jobs: Sequence[JobStatus], now_s: float, width: int) -> Iterator[str]:
    """Heads, and a line for each job: the last column is cut so that it fits `width`."""
    rows = [_row(job, now_s) for job in jobs]
    for line in table_lines([_HEADS, *rows], left=(0, 1)):
        yield cut_text(line, width)


def _row(job: JobStatus, now_s: float) -> tuple[str, ...]:
    if job.state is None and job.error:
        return (job.name, "unreadable", *["-"] * 4, printable_text(job.error))
    return (
        job.name,
        "lost" if job.state is None else str(job.state),
        str(job.world_size),
        format_duration(now_s - job.began_at_s if job.began_at_s else None),
        f"{job.step}/{job.steps}" if job.steps else str(job.step),
        format_number(job.loss),
        printable_text(_remark(job)),
    )


def _remark(job: JobStatus) -> str:
    """Why it failed; of a lost job, what brings it back."""
    if job.state is None:
        step = job.checkpoint_step
        origin = "starts from scratch" if step is None else f"continues from step {step}"
        return f"`rayzero resume {job.name}` {origin}"
    return job.error if job.state is State.FAILED else ""

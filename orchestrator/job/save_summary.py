"""Writes the summary of a job that has succeeded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rayzero.orchestrator.aio import Clock
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.results import JobResult, write_summary

SUMMARY_RETRY_S = 1.0  # pause between two attempts to write `summary.json`


async def save_summary(
    result: JobResult, clock: Clock, limit_s: float, warn: Callable[[str], None]
) -> None:
    """Writes `summary.json`, with retries for `limit_s`, because an outage of the disk may be
    short. Raises JobFailedError if the disk does not take the file, or does not answer."""
    reasons: list[str] = []

    async def write() -> None:
        while True:
            try:
                return await asyncio.to_thread(write_summary, result)
            except OSError as error:
                if not reasons:
                    warn(f"{result.summary_path} cannot be written, retrying: {error}")
                reasons.append(str(error))
            await clock.sleep(SUMMARY_RETRY_S)

    try:
        async with clock.timeout(limit_s):
            await write()
    except TimeoutError:
        reason = reasons[-1] if reasons else "no answer from the disk"
        raise JobFailedError(
            f"training has succeeded, but {result.summary_path} cannot be written for "
            f"{limit_s:g} s: {reason}",
            fix="check checkpoint.path and its disk, or set a longer recovery.patience_s, of which "
            "half is waited for",
        ) from None

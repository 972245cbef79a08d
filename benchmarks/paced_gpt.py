"""The GPT example at a limited rate: at full speed it would starve the commands beside it."""

from __future__ import annotations

import time
from typing import Any

from examples.gpt import train as gpt
from rayzero.workers.context import Context


def train(ctx: Context) -> dict[str, Any]:
    """Train as `examples.gpt.train`, with a pause of `args.pause_s` before each report."""
    ctx.args = dict(ctx.args)  # the worker calls this again after a repair
    pause_s = float(ctx.args.pop("pause_s"))
    report = ctx.report

    def report_after_pause(**values: Any) -> None:
        time.sleep(pause_s)
        report(**values)

    ctx.report = report_after_pause
    return gpt.train(ctx)

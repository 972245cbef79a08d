"""Training functions without an engine: torch.distributed and ctx.report only."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from rayzero.workers.session import Context


def train(ctx: Context) -> dict[str, Any]:
    """Averages a number over the ranks, step by step, and reports a falling loss."""
    print(f"hello from {ctx.rank} of {ctx.world_size}")
    print("to stderr", file=sys.stderr)
    value = torch.zeros(1)
    for step in range(1, ctx.steps + 1):
        value += ctx.rank + 1
        dist.all_reduce(value)
        ctx.report(tokens=100)
        ctx.report(step=step, loss=8.0 / step)
        time.sleep(ctx.args.get("pause_s", 0.01))
    return {"answer": {"first": 1.5, "last": torch.tensor(2.5)}, "env": os.environ["RANK"]}


def endless(ctx: Context) -> None:
    step = 0
    try:
        while True:
            step += 1
            dist.barrier()
            ctx.report(step=step, loss=1.0)
            time.sleep(0.02)
    finally:
        print("unwound")


def raises(ctx: Context) -> None:
    for step in range(1, ctx.steps + 1):
        dist.barrier()
        if ctx.rank == 1 and step == ctx.args["at"]:
            raise ValueError("the data has a hole")
        ctx.report(step=step)


def killed(ctx: Context) -> None:
    for step in range(1, ctx.steps + 1):
        dist.barrier()
        if ctx.rank == 1 and step == ctx.args["at"]:
            (ctx.output_dir / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        ctx.report(step=step)


def wrong_config(ctx: Context) -> None:
    from rayzero.engine.errors import ConfigError

    raise ConfigError("the batch sizes disagree", fix="train_batch_size")


def no_data(ctx: Context) -> None:
    from rayzero.engine.errors import DataError

    raise DataError(f"{ctx.args['data']!r} does not exist", fix="args.data in the job file")


def deaf(ctx: Context) -> None:
    """Goes on for good after its first step, without an interrupt point."""
    ctx.report(step=1)
    while True:
        time.sleep(0.1)

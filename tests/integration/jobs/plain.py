"""Training functions without the engine: torch.distributed and `ctx.report` only."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from rayzero.workers.context import Context


def train(ctx: Context) -> dict[str, Any]:
    """All-reduce a value in every step and report a decreasing loss."""
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


def train_forever(ctx: Context) -> None:
    step = 0
    try:
        while True:
            step += 1
            dist.barrier()
            ctx.report(step=step, loss=1.0)
            time.sleep(0.02)
    finally:
        print("unwound")


def raise_error(ctx: Context) -> None:
    for step in range(1, ctx.steps + 1):
        dist.barrier()
        if ctx.rank == 1 and step == ctx.args["fail_step"]:
            raise ValueError("the data has a hole")
        ctx.report(step=step)


def ignore_interrupts(ctx: Context) -> None:
    """Loop forever after the first step, without an interrupt point."""
    ctx.report(step=1)
    while True:
        time.sleep(0.1)

"""Training functions without the engine: torch.distributed and `ctx.report` only."""

from __future__ import annotations

import time

import torch.distributed as dist

from rayzero.workers.context import Context


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

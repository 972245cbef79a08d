"""A training function that is in a long call when a peer dies, and catches everything."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import torch

from rayzero.workers.context import Context
from tests.integration.jobs.linear import Points

LONG_CALL_S = 11.0
"""Longer than any limit of a fence that there has been, and than the least learned one."""


def train(ctx: Context) -> None:
    """In the first generation rank 1 dies, and rank 0 is in a long call then. It reads all batches
    ahead, so that it does not outlive a generation."""
    model = torch.nn.Linear(8, 1)
    engine, _, loader, _ = ctx.initialize(
        model=model, model_parameters=model.parameters(), training_data=Points()
    )
    batches = iter(list(loader.steps(ctx.steps)))
    while engine.metrics.step < ctx.steps:
        time.sleep(0.1)
        if ctx.generation == 1 and engine.metrics.step == 2:
            if ctx.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(LONG_CALL_S)
        with suppress(BaseException):
            x, y = next(batches)
            engine.backward(torch.nn.functional.mse_loss(engine(x), y))
            engine.step()

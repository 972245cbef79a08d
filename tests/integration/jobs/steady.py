"""A training function that uses the engine and runs many slow steps."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.nn.functional import mse_loss

from rayzero.workers.context import Context
from tests.integration.jobs.linear import Points


def train(ctx: Context) -> None:
    """Args of the job: `pause_s`, the time between steps; `start_s`, before the engine is built, of
    a new worker."""
    torch.manual_seed(0)
    if ctx.generation > 1:
        time.sleep(ctx.args.get("start_s", 0.0))
    model = torch.nn.Linear(8, 1)
    engine, _, loader, _ = ctx.initialize(
        model=model, model_parameters=model.parameters(), training_data=Points()
    )
    print("started", flush=True)
    try:
        _train(ctx, engine, loader)
    finally:
        print("finished", flush=True)


def _train(ctx: Context, engine: Any, loader: Any) -> None:
    for x, y in loader.until(ctx.steps):
        engine.backward(mse_loss(engine(x), y))
        engine.step()
        ctx.report(batch_mean=x.mean())
        time.sleep(ctx.args.get("pause_s", 0.04))  # leaves CPU time for the rest of the test

"""A training function that begins a step only once the version before it was read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.workers.recovery_jobs import Data, make_model
from tests.workers.survivor_jobs import await_gate

LIMIT_S = 120.0


def train(ctx: Any) -> None:
    """args: `gates`, see `survivor_jobs`. Saves the weights of each step, as the engine gathers
    them, by the generation that has them."""
    engine, _, loader, _ = ctx.initialize(model=make_model(torch.float64), training_data=Data())
    for x, y in loader.until(ctx.steps):
        step = engine.global_steps
        save(ctx, engine, step)
        await_gate(ctx, step + 1)
        await_read(ctx, step)
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
    save(ctx, engine, engine.global_steps)


def save(ctx: Any, engine: Any, step: int) -> None:
    weights = engine.state_dict()
    if ctx.is_main:
        path = weights_path(ctx.output_dir, ctx.generation, step)
        torch.save(weights, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


def weights_path(folder: Path, generation: int, step: int) -> Path:
    return folder / f"weights-{generation}-{step}.pt"


def read_path(folder: Path, step: int) -> Path:
    return folder / f"read-{step}"


def await_read(ctx: Any, step: int) -> None:
    """Until the generation is ended, as a loader of rollouts waits."""
    deadline_s = time.monotonic() + LIMIT_S
    while not read_path(ctx.output_dir, step).exists():
        if ctx._session._channel.interrupt.is_set():
            return
        assert time.monotonic() < deadline_s, f"the version of step {step} was not read"
        time.sleep(0.002)

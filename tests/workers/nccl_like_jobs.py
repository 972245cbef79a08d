"""Training functions for the NCCL-like backend: errors of kernels, and collectives of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rayzero.workers.state_copy import StateCopier
from tests.support.nccl_like.install import install_from_environment, installed
from tests.support.nccl_like.settings import NcclLike
from tests.workers.recovery_jobs import Data, make_model

LIMIT_S = 60.0

install_from_environment()  # the workers of a cluster


def poison_once(folder: Path, args: Mapping[str, Any], rank: int, step: int) -> None:
    """A kernel error on that rank in that step: the first process that gets there has it."""
    if [rank, step] not in args.get("poison", []):
        return
    try:
        (folder / f"poison-{rank}-{step}").touch(exist_ok=False)
    except FileExistsError:
        return
    device = installed()
    assert device is not None
    device.stream.poison()


def control_mirror(kind: str, step: int) -> Callable[[int], None]:
    """This rank's mirror of a step is held ("hold") until its generation ends, or ("await") is
    complete before the next step begins. Returns what to call at the beginning of a step."""
    complete, completed = StateCopier._complete, Event()

    def controlled(self: StateCopier, job: Any) -> None:
        is_chosen = job.write is not None and job.write.step == step
        if is_chosen and kind == "hold":
            while not self.interrupt.wait(1.0):
                pass
        complete(self, job)
        if is_chosen:
            completed.set()

    StateCopier._complete = controlled  # type: ignore[method-assign]
    is_awaited = kind == "await"
    return lambda started: None if started <= step or not is_awaited else _wait(completed)


def _wait(event: Event) -> None:
    assert event.wait(LIMIT_S)


def train(ctx: Any) -> dict[str, Any]:
    """As `recovery_jobs.train`; args: `poison`, pairs of a rank and a step; `mirror`: a rank and
    the arguments of `control_mirror`; `pause_s`; `nccl_like`: the backend's settings from now on.
    """
    device = installed()
    assert device is not None
    assert ctx.world_size == 1 or dist.get_backend() == "nccl_like"
    device.settings = NcclLike(**ctx.args.get("nccl_like", asdict(device.settings)))
    engine, _, loader, _ = ctx.initialize(model=make_model(torch.float64), training_data=Data())
    rank, *mirror = ctx.args.get("mirror", [None])
    begin_step = control_mirror(*mirror) if rank == ctx.rank and ctx.generation == 1 else None
    for x, y in loader.steps(ctx.steps - engine.progress.step):
        step = engine.progress.step + 1
        if begin_step is not None:
            begin_step(step)
        time.sleep(ctx.args.get("pause_s", 0.0))
        poison_once(ctx.output_dir, ctx.args, ctx.rank, step)
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
    weights = engine.state_dict()
    if ctx.is_main:
        torch.save(weights, ctx.output_dir / "weights.pt")
    return {}


def reduce_twice(ctx: Any) -> None:
    """Collectives of the user's own: two a step, and a read between them."""
    for step in range(1, ctx.steps + 1):
        value = torch.ones(1)
        dist.all_reduce(value)
        value.item()
        dist.all_reduce(value)
        value.item()
        ctx.report(step=step)
        time.sleep(0.02)

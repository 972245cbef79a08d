"""What a slow rank costs a job with `recovery.balance: auto`, and without it.

Four ranks train a small model that sleeps for each sample, so that other work on the machine
hardly counts. At a given step one rank begins to take twice as long for a sample.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.clusters import connect_to_cluster
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job_events import JobEvent
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import Workers
from rayzero.workers.context import Context

RANKS, BATCH, SLOW_RANK, SLOWDOWN = 4, 128, 2, 2.0
SAMPLE_S = 0.004
SLOW_FROM, STEPS, WINDOW = 60, 180, 40


class Points(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((8,), index / len(self))


def train(ctx: Context) -> None:
    engine, _, loader, _ = ctx.initialize(model=nn.Linear(8, 1), training_data=Points())
    for x in loader.until(ctx.steps):
        slow = ctx.rank == SLOW_RANK and engine.global_steps >= SLOW_FROM
        time.sleep(len(x) * SAMPLE_S * (SLOWDOWN if slow else 1))
        engine.backward(engine(x).square().mean())
        engine.step()


class StepTimes:
    """Collects the time of each step."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}

    def on_event(self, event: JobEvent) -> None:
        if isinstance(event, StepRecord):
            self.seconds[event.step] = event.step_s


def run(balance: Literal["even", "auto"], micro_batch: int) -> dict[str, Any]:
    """Trains once. Returns the median time of a step before and with the slow rank."""
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            "balance",
            "benchmarks.balance:train",
            engine={
                "train_batch_size": BATCH,
                "train_micro_batch_size_per_gpu": micro_batch,
                "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
                "zero_optimization": {"stage": 2},
            },
            workers=Workers(min=RANKS),
            steps=STEPS,
            recovery={"balance": balance},
            checkpoint={"path": folder},
        )
        job.run(observer=times)
    usual = [times.seconds[step] for step in range(SLOW_FROM - WINDOW, SLOW_FROM)]
    slow = [times.seconds[step] for step in range(STEPS - WINDOW + 1, STEPS + 1)]
    cost = 1 - median(usual) / median(slow)
    result = {"balance": balance, "usual_s": median(usual), "slow_s": median(slow), "cost": cost}
    settled = 1.15 * median(slow)
    first = next(step for step in range(SLOW_FROM + 5, STEPS) if times.seconds[step] < settled)
    return result | {"steps_until_settled": first - SLOW_FROM}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batch", type=int, default=8, help="samples, of a rank")
    args = parser.parse_args()
    with connect_to_cluster(1, RANKS):
        for balance in ("even", "auto", "auto"):
            print(json.dumps(run(balance, args.micro_batch)), flush=True)


if __name__ == "__main__":
    main()

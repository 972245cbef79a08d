"""A training function that uses the engine: a linear model on a synthetic dataset."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.functional import mse_loss

from rayzero.workers.context import Context


class Points(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(8.0) * (index % 7 + 1) / 10
        return x, x.sum(dim=0, keepdim=True)


def train(ctx: Context) -> dict[str, Any]:
    print(f"hello from {ctx.rank} of {ctx.world_size}")
    print("to stderr", file=sys.stderr)
    model = torch.nn.Linear(8, 1)
    engine, _, loader, _ = ctx.initialize(
        model=model, model_parameters=model.parameters(), training_data=Points()
    )
    for x, y in loader.steps(ctx.steps):
        engine.backward(mse_loss(engine(x), y))
        ctx.report(tokens=len(x))
        engine.step()
    imported = sorted({"sympy", "torch._dynamo"} & set(sys.modules))
    return {
        "samples": engine.metrics.samples,
        "slow_imports": imported,
        "answer": {"first": 1.5, "last": torch.tensor(2.5)},
    }

"""What a soak trains, in float64, and the same by plain torch."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.data.sampling import SampleOrder
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import parse_fault
from rayzero.workers.session import Context

SAMPLES, LENGTH = 12, 50  # of a step, of the data: an epoch ends within a step
HURRY_S, PAUSE_S, LONG_S = 0.02, 0.2, 2.0
TAIL = 20
"""The last steps, in which the faults that are still to come are waited for longer."""
LEARNING_RATE = 1e-2


class Points:
    """Regression samples; each is a pure function of its number."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator, dtype=torch.float64)
        return x, x.sum().reshape(1).sin()


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = (nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 1))
    return nn.Sequential(*layers).double()


def engine_config(stage: int) -> dict[str, Any]:
    return {
        "gradient_clipping": 0,
        "train_batch_size": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200},
    }


def train(ctx: Context) -> None:
    """Trains for `ctx.steps` steps and leaves the weights in `weights.pt`.

    Where workers are missing it dawdles: a fault may be meant for a rank that is still to come.
    """
    model = make_model(ctx.seed)
    engine, _, loader, _ = ctx.initialize(model=model, training_data=Points())
    for x, y in loader.steps(ctx.steps - engine.progress.step):
        time.sleep(_pause_s(ctx, ctx.steps - engine.progress.step))
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
    weights = engine.state_dict()
    if ctx.is_main:
        torch.save(weights, ctx.output_dir / "weights.pt")


def _pause_s(ctx: Context, steps_left: int) -> float:
    if ctx.world_size == ctx.args["world_size"]:
        return HURRY_S
    if steps_left > TAIL or not unfired(ctx.args["faults"], str(ctx.output_dir)):
        return PAUSE_S
    return LONG_S


def unfired(faults: list[str], output_dir: str) -> list[str]:
    """The faults that did not happen as often as they should have."""
    happened = [one.fault for one in FaultRecord(output_dir).read()]
    return [text for text in faults if happened.count(text) < parse_fault(text).total_firings]


def oracle(steps: int, seed: int) -> dict[str, Tensor]:
    """The weights by plain torch: only the order of the samples is ours."""
    model, data, order = make_model(seed), Points(), SampleOrder(LENGTH, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        batch = [data[int(one)] for one in order.indices(step * SAMPLES, SAMPLES)]
        x, y = (torch.stack(part) for part in zip(*batch, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return {name: one.detach() for name, one in model.state_dict().items()}

"""Train a tiny model for a few steps on the current process group, if any."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import rayzero

STEPS, SAMPLES, WIDTH = 4, 6, 5


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [module for _ in range(3) for module in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1)).double()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = SAMPLES, WIDTH
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def train(stage: int) -> list[float]:
    """Train with rayzero; return the loss of every global batch."""
    engine, *_ = rayzero.initialize(
        model=make_model(),
        config={
            "gradient_clipping": 0,
            "train_batch_size": SAMPLES,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
            "zero_optimization": {"stage": stage},
        },
    )
    losses = []
    for batch in batches():
        local_batch = batch.chunk(engine.world_size)[engine.rank]
        engine.backward((engine(local_batch) - 1).square().mean())
        engine.step()
        losses.append(engine.metrics.loss)
    return losses


def train_reference() -> list[float]:
    """Train with plain PyTorch on the global batches; return their losses."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

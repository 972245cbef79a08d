"""Trains a residual network on handwritten digits.

    rayzero run examples/vision/job.yaml

`train` runs on every worker, and stays in its loop after a fault or a change of the number of
workers: the loader yields the samples of a lost step again. In a new worker `ctx.initialize`
returns an engine at the job's current step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from examples.vision.data import SIZE, load
from examples.vision.model import ResNet

if TYPE_CHECKING:
    from rayzero import Context, Engine

EVALUATION_INTERVAL = 50  # steps


def train(ctx: Context) -> dict[str, Any]:
    """Train for `ctx.steps` steps. Returns entries for the job's summary."""
    train_set, test_set = load()
    torch.manual_seed(ctx.seed)
    model = ResNet(SIZE * SIZE, ctx.args["width"], outputs=10)
    engine, _, loader, _ = ctx.initialize(model=model, training_data=train_set)
    for images, labels in loader.until(ctx.steps):
        loss = cross_entropy(engine(images), labels)
        engine.backward(loss)
        engine.step()
        if engine.progress.step % EVALUATION_INTERVAL == 0:
            ctx.report(accuracy=accuracy(engine, test_set))  # of the held-out images, on the page
    return {"accuracy": accuracy(engine, test_set)}


@torch.no_grad()
def accuracy(engine: Engine, dataset: TensorDataset) -> float:
    """The share of correct answers, the same on all ranks. Each rank takes its part of the images
    in one batch: at stage 3 a forward is collective, so all ranks must call it equally often."""
    engine.eval()
    mine = slice(engine.rank, None, engine.world_size)
    images, labels = (tensor[mine].to(engine.device) for tensor in dataset.tensors)
    correct = (engine(images).argmax(dim=1) == labels).sum()
    engine.train()
    if dist.is_initialized():
        dist.all_reduce(correct)
    return correct.item() / len(dataset)

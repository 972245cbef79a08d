"""Trains two towers so that an image and its caption have similar embeddings.

    rayzero run examples/multimodal/job.yaml

`train` runs on every worker, and stays in its loop after a fault or a change of the number of
workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import TensorDataset

from examples.multimodal.contrast import contrastive_loss, gather_rows
from examples.multimodal.data import all_captions, load
from examples.multimodal.model import TwoTowers

if TYPE_CHECKING:
    from rayzero import Context, Engine

TRAIN_PAIRS, TEST_PAIRS = 20_000, 1_000
EVALUATION_INTERVAL = 50  # steps


def train(ctx: Context) -> dict[str, Any]:
    """Train for `ctx.steps` steps. Returns entries for the job's summary."""
    train_set, test_set = load(TRAIN_PAIRS, TEST_PAIRS)
    torch.manual_seed(ctx.seed)
    model = TwoTowers(**ctx.args)
    engine, _, loader, _ = ctx.initialize(model=model, training_data=train_set)
    for images, captions, _ in loader.until(ctx.steps):
        loss = contrastive_loss(*engine(images, captions))
        engine.backward(loss)
        engine.step()
        if engine.progress.step % EVALUATION_INTERVAL == 0:
            ctx.report(**retrieval(engine, test_set))  # on the page
    return retrieval(engine, test_set)


@torch.no_grad()
def retrieval(engine: Engine, dataset: TensorDataset) -> dict[str, float]:
    """Recall at 1 among held-out pairs, the same on all ranks: the share of images that find their
    one of 100 captions, and of captions that find an image of theirs. Collective."""
    engine.eval()
    mine = slice(engine.rank, None, engine.world_size)
    images, _, labels = (tensor[mine].to(engine.device) for tensor in dataset.tensors)
    image_rows, caption_rows, _ = engine(images, all_captions().to(engine.device))
    engine.train()
    every_image, _ = gather_rows(image_rows)
    every_label, _ = gather_rows(labels.unsqueeze(1))
    products = every_image @ caption_rows.T  # (images, 100 captions)
    found_captions = products.argmax(dim=1) == every_label.squeeze(1)
    found_images = every_label.squeeze(1)[products.argmax(dim=0)] == torch.arange(
        len(caption_rows), device=engine.device
    )
    return {
        "image_to_caption": found_captions.double().mean().item(),
        "caption_to_image": found_images.double().mean().item(),
    }

"""The contrastive example: its loss over all ranks is plain torch's over the global batch."""

from __future__ import annotations

import pytest
import torch

import rayzero
from examples.multimodal.contrast import contrastive_loss
from examples.multimodal.data import LENGTH, NAMES, TEMPLATES, WORDS, all_captions, encode, load
from examples.multimodal.model import TwoTowers
from rayzero.engine.data.sampling import SampleOrder
from tests.support.ranks import run_ranks

PAIRS, BATCH, STEPS = 40, 7, 4


def make_model() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers(width=8, layers=1, outputs=8).double()


def plain_losses() -> list[float]:
    """Losses of torch's SGD in one process."""
    images, captions, _ = load(PAIRS, 1)[0].tensors
    model, order = make_model(), SampleOrder(PAIRS, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        rows = torch.from_numpy(order.indices(step * BATCH, BATCH))
        loss = contrastive_loss(*model(images[rows].double(), captions[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_on_ranks(rank: int, world: int, stage: int) -> list[float]:
    config = {
        "train_batch_size": BATCH,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    data = load(PAIRS, 1)[0]
    engine, _, loader, _ = rayzero.initialize(model=make_model(), config=config, training_data=data)
    losses = []
    for images, captions, _ in loader.until(STEPS):
        engine.backward(contrastive_loss(*engine(images.double(), captions)))
        engine.step()
        losses.append(engine.metrics.loss)
    return losses


@pytest.mark.parametrize(("world", "stage"), [(3, 2), (2, 3), (1, 0)])
def test_loss_over_ranks_is_that_of_the_global_batch(world: int, stage: int) -> None:
    expected = plain_losses()
    assert expected[-1] < expected[0] - 0.01
    for losses in run_ranks(world, losses_on_ranks, stage):
        assert losses == pytest.approx(expected, rel=1e-12)


def test_captions_name_the_digits_in_order() -> None:
    train, test = load(50, 10)
    images, captions, labels = train.tensors
    assert (images.shape, captions.shape) == ((50, 1, 8, 16), (50, LENGTH))
    assert len(test) == 10
    for caption, label in zip(captions.tolist(), labels.tolist(), strict=True):
        left, right = NAMES[label // 10], NAMES[label % 10]
        assert caption in [encode(text.format(left=left, right=right)) for text in TEMPLATES]
    assert len(all_captions().unique(dim=0)) == 100
    assert max(encode(" ".join(WORDS[:1]))) == 1

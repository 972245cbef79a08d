"""Training that leaves out bad samples: against plain torch, over ranks, and after a load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.engine.data.sample_ledger import SampleLedger, check_ledger, read_ledger
from rayzero.engine.data.sampling import SampleOrder
from rayzero.engine.errors import DataError
from rayzero.engine.session import HostSession, use_session
from tests.engine.data.items import LENGTH, Items
from tests.support.ranks import run_ranks

BATCH, STEPS, LR = 6, 4, 0.1
ORDER = SampleOrder(LENGTH, 0)
BAD = sorted(ORDER.indices(0, 24)[[1, 2, 3, 10, 23]].tolist())
"""In the first step half of the samples, of several ranks; whole micro-batches."""


def make_item(index: int) -> tuple[Tensor, Tensor]:
    if index in BAD:
        raise ValueError("damaged")
    return torch.tensor([index / LENGTH, 1.0]).double(), torch.tensor([index % 7.0]).double()


class Ledger(HostSession):
    """The part of a session that gets the samples."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.ledger = SampleLedger(folder, 1, rank, world)

    def on_samples_consumed(self, samples: Sequence[int]) -> None:
        self.ledger.add_samples(samples)

    def on_samples_skipped(self, samples: Sequence[int]) -> None:
        self.ledger.add_skipped(samples)

    def on_step_end(self, metrics: dict[str, float], agreed: Any) -> None:
        self.ledger.write_step(int(metrics["step"]))


def build(limit: int, workers: int) -> Any:
    torch.manual_seed(1)
    config = {
        "gradient_clipping": 0,
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": 2},
        "rayzero": {"loader": {"max_bad_samples": limit, "num_workers": workers}},
    }
    model = nn.Linear(2, 1).double()
    return rayzero.initialize(model=model, config=config, training_data=Items(make_item))[::2]


def train(engine: Any, loader: Any, until: int) -> None:
    for inputs, targets in loader.until(until):
        engine.backward((engine(inputs) - targets).square().mean())
        engine.step()


def train_with_bad(rank: int, world: int, folder: Path, workers: int) -> tuple[Any, int]:
    with use_session(Ledger(folder, rank, max(world, 1))):
        engine, loader = build(len(BAD), workers)
        train(engine, loader, STEPS)
        found = engine.state_dict(), engine.progress.bad_samples
        engine.close()
    return found


@pytest.mark.parametrize(("world", "workers"), [(0, 0), (2, 2), (3, 0)])
def test_bad_samples_count_as_a_loss_of_zero(world: int, workers: int, tmp_path: Path) -> None:
    (weights, bad), *_ = run_ranks(world, train_with_bad, tmp_path, workers)
    torch.manual_seed(1)
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in ORDER.indices(step * BATCH, BATCH).tolist():
            if index not in BAD:
                inputs, targets = make_item(index)
                ((model(inputs) - targets).square().sum() / BATCH).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12)
    assert bad == len(BAD)
    assert check_ledger(tmp_path, ORDER, BATCH, STEPS) == []
    skipped = read_ledger(tmp_path, skipped=True)
    assert sorted(sample for step in skipped.values() for sample in step) == BAD
    assert [len(skipped[step]) for step in (1, 2, 3, 4)] == [3, 1, 0, 1]


def save(rank: int, world: int, folder: Path) -> None:
    engine, loader = build(4, 0)
    train(engine, loader, 3)
    engine.save(folder, "three")
    engine.close()


def load_and_exceed(rank: int, world: int, folder: Path) -> tuple[str, int]:
    engine, loader = build(4, 0)
    engine.load(folder, "three")
    with pytest.raises(DataError) as caught:
        train(engine, loader, 4)
    step = engine.global_steps
    engine.close()
    return str(caught.value), step


def test_a_checkpoint_keeps_the_count_of_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, save, tmp_path)
    ((text, step),) = run_ranks(0, load_and_exceed, tmp_path)
    assert "cannot be used: ValueError: damaged" in text
    assert "4 such samples in a job; this is number 5" in text
    assert "max_bad_samples" in text
    assert step == 3


def exceed_together(rank: int, world: int) -> tuple[str, int]:
    engine, loader = build(2, 0)
    with pytest.raises(DataError) as caught:
        train(engine, loader, 4)
    step = engine.global_steps
    engine.close()
    return str(caught.value), step


def test_ranks_that_are_each_within_the_limit_stop_together() -> None:
    """Of the three bad samples of the first step two are of rank 0, one of rank 1."""
    for text, step in run_ranks(2, exceed_together):
        assert "3 samples could not be used, 3 of them in step 1" in text
        assert step == 0

"""The order of an epoch's rest in another process, against one of torch's that read it all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from rayzero.workers.launch.read_batches import (
    _begin,
    iterate_behind,
    keep_seed,
    leave_out_epoch,
    random_state_of,
)

KINDS = ["own process", "workers", "workers that persist"]


def make_loader(kind: str, has_generator: bool) -> Any:
    options: dict[str, Any] = {}
    if kind != KINDS[0]:
        persistent = kind == KINDS[2]
        options = {"num_workers": 1, "multiprocessing_context": "fork"}
        options["persistent_workers"] = persistent
    if has_generator:
        options["generator"] = torch.Generator().manual_seed(5)
    return DataLoader(range(24), batch_size=4, shuffle=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("has_generator", [False, True], ids=["global generator", "own generator"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epoch", [1, 3])
def test_rest_of_an_epoch(epoch: int, kind: str, has_generator: bool) -> None:
    loader = make_loader(kind, has_generator)
    for _ in range(epoch):
        rng = torch.get_rng_state()
        batches = [batch.tolist() for batch in _begin(loader)]
    loader = make_loader(kind, has_generator)
    for left_out in range(1, epoch):
        leave_out_epoch(loader, left_out)
    with random_state_of(rng):
        if epoch > 1 and loader.persistent_workers:
            keep_seed(loader)
        rest = iterate_behind(loader, 2, partial(_begin, loader))
        assert [batch.tolist() for batch in rest] == batches[2:]

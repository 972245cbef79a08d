"""What the scripts beside this file share: notes in a folder, samples, a rank that kills itself."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset, IterableDataset


def note(folder: Path, name: str, value: object) -> None:
    with (folder / f"{name}-{os.environ['RANK']}").open("a") as file:
        file.write(json.dumps(value) + "\n")


def kill_once(folder: Path) -> None:
    if not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Rows(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator, dtype=torch.float64), index


class Blocks:
    """The numbers below `samples`, in blocks of 3."""

    name = "numbers"

    def __init__(self, samples: int) -> None:
        starts = range(0, samples, 3)
        self.counts = np.array([min(3, samples - start) for start in starts], dtype=np.int64)
        self.fingerprint = f"{samples} numbers"

    def read(self, block: int) -> pa.Table:
        return pa.table({"number": range(3 * block, 3 * block + int(self.counts[block]))})

    def describe(self, block: int) -> str:
        return f"block {block}"


class Iterable(IterableDataset[Any]):
    """A dataset in another order in each epoch, which begins with sample 5 * epoch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        count = len(self.dataset)
        return (self.dataset[(index + 5 * self.epoch) % count] for index in range(count))

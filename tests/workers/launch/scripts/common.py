"""What the scripts beside this file share: notes in a folder, samples, a rank that kills itself."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
from torch.utils.data import Dataset


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

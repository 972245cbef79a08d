"""The source of Python's standard library as bytes, in samples of equal length."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY = 256  # a token is a byte
TEST_INTERVAL = 10  # every tenth sample is held out


class Source(Dataset[dict[str, Tensor]]):
    """What a causal language model of transformers takes: `input_ids`, and `labels`, which the
    model shifts by itself.

    Args:
        length: bytes of a sample.
        held_out: the held-out samples instead of those for training.
        limit: maximum number of samples.
    """

    def __init__(self, length: int, *, held_out: bool = False, limit: int | None = None) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        samples = tokens[: len(tokens) // length * length].view(-1, length)
        is_held_out = torch.arange(len(samples)) % TEST_INTERVAL == 0
        self.samples = samples[is_held_out == held_out][:limit]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.samples[index], "labels": self.samples[index]}

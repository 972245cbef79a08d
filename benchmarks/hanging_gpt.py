"""The GPT example's model on random tokens, in a process that hangs when a file says so."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from examples.gpt.model import GPT, GPTConfig
from rayzero.workers.context import Context

HANGS = {
    "spin": "an endless loop in the forward",
    "spin-locked": "the same in native code that holds Python's lock: the process answers nothing",
    "deadlock": "a wait in native code that holds Python's lock",
    "read": "a read of the dataset that never returns",
}


def told_file(folder: Path, pid: int) -> Path:
    return folder / f"hang-{pid}"


def _hang_if_told(folder: Path, *kinds: str) -> None:
    file = told_file(folder, os.getpid())
    if not file.exists() or (kind := file.read_text()) not in kinds:
        return
    if kind == "spin":
        while True:
            pass
    if kind == "spin-locked":
        re.match("(a+)+b", "a" * 64)  # for centuries
    if kind == "deadlock":
        ctypes.PyDLL(None).pause()
    if kind == "read":
        os.read(os.pipe()[0], 1)


class _Tokens(Dataset[Tensor]):
    def __init__(self, folder: Path, context: int) -> None:
        self._folder = folder
        self._context = context

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Tensor:
        _hang_if_told(self._folder, "read")
        own = torch.Generator().manual_seed(index)
        return torch.randint(256, (self._context + 1,), generator=own)


def train(ctx: Context) -> dict[str, Any]:
    """Trains without end; `args`: the model's, and `told`, the folder of the files."""
    args = dict(ctx.args)
    folder = Path(args.pop("told"))
    config = GPTConfig(**args)
    torch.manual_seed(ctx.seed)
    model = GPT(config)
    engine, _, loader, _ = ctx.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=_Tokens(folder, config.context),
    )
    for batch in loader.until(ctx.steps):
        loss = engine(batch[:, :-1], batch[:, 1:])
        _hang_if_told(folder, "spin", "spin-locked", "deadlock")
        engine.backward(loss)
        engine.step()
    return {}

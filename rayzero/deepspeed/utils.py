"""`deepspeed.utils`: logging, `RepeatingLoader`, and the engine's tensor fragments API.

Messages are printed from INFO on, as in DeepSpeed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from logging import INFO, Formatter, Logger, StreamHandler, getLogger  # not `utils.logging`
from typing import Any

import torch

from rayzero.deepspeed.comm import get_rank, is_initialized
from rayzero.deepspeed.lookup import resolve, working_names
from rayzero.engine.tensor_tree import map_tensors

__all__ = [name for name in working_names("utils") if not name.startswith("_")]


def make_stderr_logger(name: str) -> Logger:
    """Returns a logger whose messages go to stderr, unless it has a handler already."""
    new = getLogger(name)
    if not new.handlers:
        handler = StreamHandler(sys.stderr)
        handler.setFormatter(Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        new.addHandler(handler)
        new.setLevel(INFO)
        new.propagate = False  # otherwise a root logger that prints would repeat the messages
    return new


logger = make_stderr_logger("DeepSpeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Logs a message on `ranks`, or on all ranks if these include -1. Without `ranks`, logs only
    before torch.distributed is initialized, as DeepSpeed does."""
    rank = get_rank()
    if not is_initialized() or {-1, rank} & {*(ranks or ())}:
        logger.log(level, "[Rank %d] %s", rank, message)


class RepeatingLoader:
    """Iterates over a loader again and again."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            while getattr(self.loader, "is_replaying", False):
                iter(self.loader)
            self._iterator = iter(self.loader)
            return next(self._iterator)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Returns a copy of nested dicts, lists and tuples whose tensors have their own memory on
    `device`. The model's tensors are views of the engine's buffers, and `torch.save` writes a
    view's whole buffer."""
    return map_tensors(item, lambda tensor: tensor.detach().to(device, copy=True))


def instrument_w_nvtx(func: Any) -> Any:
    """Returns `func`: ranges are not recorded; torch.profiler shows the engine's phases."""
    return func


def __getattr__(name: str) -> Any:
    return resolve("utils", name)

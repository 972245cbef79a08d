"""`deepspeed.utils`: logging, `RepeatingLoader`, and the engine's tensor fragments API.

Messages are printed from INFO on, as in DeepSpeed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from logging import (  # not `utils.logging`
    INFO,
    Formatter,
    Logger,
    StreamHandler,
    getLevelNamesMapping,
    getLogger,
)
from pathlib import Path
from typing import Any

import torch

from rayzero.deepspeed.comm import get_rank, is_initialized
from rayzero.deepspeed.lookup import resolve, working_names
from rayzero.engine.tensor_tree import map_tensors

__all__ = [name for name in working_names("utils") if not name.startswith("_")]


def make_stderr_logger(name: str) -> Logger:
    """A logger whose messages go to stderr, unless it has a handler already."""
    new = getLogger(name)
    if not new.handlers:
        handler = StreamHandler(sys.stderr)
        handler.setFormatter(Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        new.addHandler(handler)
        new.setLevel(INFO)
        new.propagate = False  # a root logger that prints too would print it twice
    return new


logger = make_stderr_logger("DeepSpeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Logs on these ranks, on all of them for one of -1; without ranks only before
    torch.distributed is initialized, as in DeepSpeed."""
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
    """A copy of nested dicts, lists and tuples whose tensors have memory of their own on `device`:
    the model's are views of the engine's buffers, and `torch.save` writes a view's whole buffer."""
    return map_tensors(item, lambda tensor: tensor.detach().to(device, copy=True))


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """`log_dist`, the first time that a message is logged."""
    if message not in _logged:
        _logged.add(message)
        log_dist(message, ranks, level)


_logged: set[str] = set()


def print_json_dist(
    message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | None = None
) -> None:
    """Prints a dict as JSON on these ranks, and writes it to a file if a path is given."""
    if ranks and -1 not in ranks and get_rank() not in ranks:
        return
    text = json.dumps({"rank": get_rank(), **message})
    print(text)
    if path is not None:
        Path(path).write_text(text)


def set_log_level_from_string(log_level_str: str, custom_logger: Logger | None = None) -> None:
    """Sets the level of `logger`, or another one: debug, info, warning, error or critical."""
    (custom_logger or logger).setLevel(log_level_str.upper())


def get_current_level() -> int:
    """The level of `logger`."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether messages of this level are logged."""
    return logger.isEnabledFor(getLevelNamesMapping()[max_log_level_str.upper()])


@cache
def warning_once(*args: Any) -> None:
    """`logger.warning`, the first time that it is called so."""
    logger.warning(*args)


logger.warning_once = warning_once  # type: ignore[attr-defined]  # as in DeepSpeed


def instrument_w_nvtx(func: Any) -> Any:
    """The function: ranges are not recorded; torch.profiler shows the engine's phases."""
    return func


def __getattr__(name: str) -> Any:
    return resolve("utils", name)

"""`deepspeed.utils.RepeatingLoader`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class RepeatingLoader:
    """A loader that begins anew whenever it ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)

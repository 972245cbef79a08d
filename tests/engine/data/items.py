"""A dataset whose module imports nothing: each process of a loader imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LENGTH = 40


class Items:
    """Items that a function makes of their indices."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.make(index)

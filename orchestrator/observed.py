"""State that coroutines wait for: every change of it wakes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ObservedState:
    """Base class of state that waiters' predicates read (`ChangeNotifier.wait_until`).

    Assigning an attribute calls `on_change`, so that no code has to remember to wake the waiters.
    A container in such an attribute is immutable, and replaced; or it is changed only by methods
    of the class, which then call `_changed`.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        super().__setattr__("_changed", on_change)

    _changed: Callable[[], None]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self._changed()

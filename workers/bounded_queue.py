"""A queue bounded by the number and the bytes of its items, for texts that users' code produces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MAX_ITEMS = 10_000
MAX_BYTES = 8 * 2**20
_OVERHEAD_BYTES = 64


class BoundedQueue(Generic[T]):
    """Keeps the newest items that fit, but at least one. Not thread-safe. `end` is the number of
    items ever appended."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_items: int = MAX_ITEMS) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._nbytes = 0
        self.end = 0
        self._dropped = self._dropped_bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_half_full(self) -> bool:
        return 2 * len(self) > self._max_items or 2 * self._nbytes > self._max_bytes

    def append(self, item: T) -> None:
        nbytes = approximate_bytes(item)
        self._items.append((item, nbytes))
        self._nbytes += nbytes
        self.end += 1
        while len(self._items) > 1 and (
            len(self._items) > self._max_items or self._nbytes > self._max_bytes
        ):
            self._dropped += 1
            self._dropped_bytes += self._items[0][1]
            self.popleft()

    def popleft(self) -> T:
        item, nbytes = self._items.popleft()
        self._nbytes -= nbytes
        return item

    def take_dropped(self) -> tuple[int, int]:
        """Returns the number and the bytes of the items dropped since the last call."""
        dropped = self._dropped, self._dropped_bytes
        self._dropped = self._dropped_bytes = 0
        return dropped

    def clear(self) -> None:
        self._items.clear()
        self._nbytes = 0

    def since(self, index: int, max_bytes: float = float("inf")) -> Iterator[T]:
        """Yields the kept items from number `index` on, as many as fit into `max_bytes`. The first
        of them is yielded in any case."""
        skipped = max(0, index - self.end + len(self._items))
        for count, (item, nbytes) in enumerate(islice(self._items, skipped, None)):
            max_bytes -= nbytes
            if count and max_bytes < 0:
                return
            yield item


def approximate_bytes(value: Any, depth: int = 3) -> int:
    """Estimates the memory of a text, a container or a record. Values that are nested deeper than
    `depth` count with a constant."""
    if isinstance(value, str):
        return _OVERHEAD_BYTES + len(value)
    fields = value if isinstance(value, Mapping) else getattr(value, "__dict__", value)
    if isinstance(fields, Mapping):
        fields = fields.values()
    if depth == 0 or not isinstance(fields, tuple | list | type({}.values())):
        return _OVERHEAD_BYTES
    return _OVERHEAD_BYTES + sum(approximate_bytes(field, depth - 1) for field in fields)

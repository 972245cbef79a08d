"""The caller's own state, registered by name: EMA weights, counters, a trainer's bookkeeping.

Each rank's values are stored with its part of the training state, as one range of bytes,
`registered.<rank>`: the size of a JSON text, that text, and the bytes of the values' arrays. They
are in the block, not in the JSON part of the state, because that has little room, and is parsed
whenever a state is opened. Shared values are in a separate range, `registered.<rank>.shared`,
because every rank reads the shared values of all ranks, and other values may be as large as a
model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rayzero.engine.errors import EngineError
from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.state.client_state import decode_client_state, encode_client_state
from rayzero.engine.state.metadata import damaged_unless_valid
from rayzero.engine.state.ranges import StateRange, read_ranges, whole_tensor_range

log = logging.getLogger("rayzero.engine")

_SHARED = ".shared"
"""Suffix of the name of a range of shared values."""
_SIZE_BYTES = 8
_SMALLEST_BYTES = 4096
_SPARE_PARTS = 8
"""Memory is up to 1 / `_SPARE_PARTS` larger than the values, so that it is seldom allocated again:
then the block's index changes, and the block needs new slots."""


@dataclass(frozen=True)
class _Entry:
    get: Callable[[], Any]
    set: Callable[[Any], object]
    shared: bool


class _Memory:
    """Memory of captured values. It is allocated again when the values need more."""

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def store(self, values: dict[str, Any]) -> None:
        if not values:
            return
        parts = _encode(values)
        nbytes = sum(part.nbytes for part in parts)
        if nbytes > self.tensor.numel():
            self.tensor = torch.zeros(_capacity(nbytes), dtype=torch.uint8)
        memory, offset = self.tensor.numpy(), 0
        for part in parts:
            memory[offset : offset + part.nbytes] = part
            offset += part.nbytes


class StateRegistry:
    """The state that one engine's caller has registered on this rank.

    `set` is called once with a value that was read from a state: by `deliver`, or by `register`
    if the name is registered later, but before the next `capture`.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._restored: dict[str, Any] = {}  # read, but no `set` was called with it yet
        self._is_own = True  # whether `_restored` was saved by this rank, not by another one
        self._own = _Memory()
        self._shared = _Memory()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def register(
        self,
        name: str,
        get: Callable[[], Any],
        set: Callable[[Any], object],  # noqa: A002
        *,
        shared: bool = False,
    ) -> None:
        """See `TrainingState.register`."""
        if not isinstance(name, str) or not name:
            raise EngineError(f"state is registered as {name!r}", allowed="a name: text")
        for argument, function in (("get", get), ("set", set)):
            if not callable(function):
                raise EngineError(
                    f"state {name!r}: {argument} is a {type(function).__name__}",
                    allowed="get: a function without arguments that returns the value; set: one "
                    "that takes it",
                )
        if name in self._entries:
            raise EngineError(
                f"state {name!r} is registered twice", allowed="one get and set for each name"
            )
        self._entries[name] = _Entry(get, set, shared)
        self.deliver()

    @property
    def is_shared(self) -> bool:
        """Whether a shared value is registered."""
        return any(entry.shared for entry in self._entries.values())

    def take_over(self, other: StateRegistry) -> None:
        """Takes the values that another registry has read, and the entries registered there."""
        self._restored, self._is_own = other._restored, other._is_own
        for name, entry in other._entries.items():
            self.register(name, entry.get, entry.set, shared=entry.shared)
        self.deliver()

    def read(self, source: StateSource, rank: int) -> None:
        """Reads this rank's values; rank 0's if the saved run did not have this rank."""
        document = source.metadata(rank)
        self._is_own = document.get("rank") == rank
        if not self._is_own:
            document = source.metadata(0)
        name = _range_name(document.get("rank"))
        has_own = any(name in index.tensors for index in source.block_indexes)
        self._restored = _read_range(source, name) if has_own else {}
        self.read_shared(source)

    def read_shared(self, source: StateSource) -> None:
        """Reads the shared values of all ranks, in the order of ranks."""
        names = {name for index in source.block_indexes for name in index.tensors}
        in_rank_order = sorted(names, key=lambda name: (len(name), name))
        parts = [_read_range(source, name) for name in in_rank_order if name.endswith(_SHARED)]
        shared: dict[str, list[Any]] = {}
        for part in parts:
            for name, value in part.items():
                shared.setdefault(name, []).append(value)
        self._restored |= shared

    def deliver(self) -> None:
        """Calls `set` of each registered name for which a value was read."""
        for name in [name for name in self._restored if name in self._entries]:
            self._entries[name].set(self._restored.pop(name))

    def capture(self) -> None:
        """Calls each `get`, and keeps the values for `ranges`. Raises what a `get` raises;
        EngineError, with its path, for a value that cannot be stored."""
        self._drop_unregistered()
        own, shared = dict[str, Any](), dict[str, Any]()
        for name, entry in self._entries.items():
            if entry.shared:
                if name in self._restored:
                    entry.set(self._restored.pop(name))
                shared[name] = entry.get()
            else:
                own[name] = self._restored[name] if name in self._restored else entry.get()
        self._own.store(own)
        self._shared.store(shared)

    def _drop_unregistered(self) -> None:
        names = [name for name in self._restored if name not in self._entries]
        for name in names:
            del self._restored[name]
        if names and self._is_own:
            log.warning(
                "the restored state has %s, which this call of the training function has not "
                "registered: it is dropped\n  fix: call ctx.state in every call of the function, "
                "before its first step",
                ", ".join(map(repr, names)),
            )

    @property
    def memory_signature(self) -> tuple[tuple[int, int], ...]:
        """Addresses and sizes of the memory that holds the captured values."""
        memories = (self._own.tensor, self._shared.tensor)
        return tuple((memory.data_ptr(), memory.numel()) for memory in memories)

    def ranges(self, rank: int) -> list[StateRange]:
        """Returns the ranges of the captured values."""
        names = {_range_name(rank): self._own, _range_name(rank) + _SHARED: self._shared}
        return [
            whole_tensor_range(name, memory.tensor)
            for name, memory in names.items()
            if len(memory.tensor)
        ]


def read_value(source: StateSource, rank: int, name: str) -> Any:
    """Reads one registered value of a state before an engine exists. Returns None if the state has
    no such name. `rank` as in `StateRegistry.read`."""
    registry, found = StateRegistry(), list[Any]()
    registry.register(name, lambda: None, found.append)
    registry.read(source, rank)
    registry.deliver()
    return found[0] if found else None


def _encode(values: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    """Returns the bytes to store, in parts. The bytes of arrays are views of the values."""
    arrays: list[np.ndarray[Any, Any]] = []
    nbytes = 0

    def place(array: np.ndarray[Any, Any], where: str) -> list[int]:
        nonlocal nbytes
        arrays.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        begin, nbytes = nbytes, nbytes + array.nbytes
        return [begin, nbytes]

    text = json.dumps(
        {
            name: encode_client_state(value, f"state {name!r}: value", place)
            for name, value in values.items()
        }
    ).encode()
    head = len(text).to_bytes(_SIZE_BYTES, "little") + text
    return [np.frombuffer(head, np.uint8), *arrays]


def _decode(memory: memoryview) -> dict[str, Any]:
    start = _SIZE_BYTES + int.from_bytes(memory[:_SIZE_BYTES], "little")
    document = json.loads(bytes(memory[_SIZE_BYTES:start]))
    arrays = memory[start:]
    return {
        name: decode_client_state(value, lambda span: arrays[span[0] : span[1]])
        for name, value in document.items()
    }


def _read_range(source: StateSource, name: str) -> dict[str, Any]:
    tensor = next(index.tensors[name] for index in source.block_indexes if name in index.tensors)
    memory = torch.empty(tensor.shape, dtype=torch.uint8)
    read_ranges([whole_tensor_range(name, memory)], source)
    with damaged_unless_valid("registered state"):
        values: dict[str, Any] = _decode(memory.numpy().data)
    return values


def _range_name(rank: int | None) -> str:
    return f"registered.{rank}"


def _capacity(nbytes: int) -> int:
    part = max(_SMALLEST_BYTES, (1 << nbytes.bit_length()) // (2 * _SPARE_PARTS))
    return -(-nbytes // part) * part

"""What happens on the bookkeeping device: bytes in use, and what the host waits for."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.virtual_device.memory import Place, current_place, describe


class Bytes:
    """Bytes of device storages, as they come and go, by the functions that made them."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._seen: set[int] = set()
        self._places: Counter[Place] = Counter()

    def made_by(self, function: str, file: str) -> int:
        """Of the storages of today that were made below a function of the product."""
        return sum(
            size
            for place, size in self._places.items()
            if any(it.co_name == function and it.co_filename.endswith(file) for it, _ in place)
        )

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type != "cuda" or key in self._seen:
            return
        self._seen.add(key)
        size, place = storage.nbytes(), current_place()
        self.now += size
        self._places[place] += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size, place).atexit = False

    def _drop(self, key: int, size: int, place: Place) -> None:
        self._seen.discard(key)
        self._places[place] -= size
        self.now -= size


class Census(TorchDispatchMode):
    """Counts what the host waits for, and bytes; numbers that the host reads are 1."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: Counter[str] = Counter()
        self.bytes = Bytes()

    def wait(self, kind: str) -> None:
        self.syncs[f"{kind} at {describe(current_place())}"] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            if args[0].device.type == "cuda":
                self.wait("item")
            return 1.0 if args[0].dtype.is_floating_point else 1
        out = func(*args, **kwargs)
        if name in ("aten::copy_", "aten::_to_copy"):
            self._copied(name, args, kwargs, out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.bytes.note(tensor)
        return out

    def _copied(self, name: str, args: Any, kwargs: Any, out: Tensor) -> None:
        source = args[1] if name == "aten::copy_" else args[0]
        beside = kwargs.get("non_blocking") or (name == "aten::copy_" and True in args[2:])
        if source.device.type != out.device.type and not beside:
            self.wait(f"blocking copy {source.device.type} to {out.device.type}")

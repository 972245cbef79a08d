"""The most bytes that are alive at once while a piece of code runs, on tensors that are not there.

Method: every operation's outputs are seen through a dispatch mode; a storage counts from the
operation that made it until Python and autograd have let go of it. With fake tensors that costs
neither memory nor arithmetic.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rayzero.engine.zero.trees import tensors_in


class LiveBytes(TorchDispatchMode):
    """Counts storages that are made within it.

    Args:
        known: tensors whose memory is accounted for elsewhere, such as parameters.

    Attributes:
        now: bytes alive.
        peak: the most there were.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._counted = {one.untyped_storage()._cdata for one in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._count(tensor)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._counted:
            return
        self._counted.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, nbytes: int) -> None:
        self._counted.discard(key)
        self.now -= nbytes

"""A narrower (or wider) floating type on the wire; sums stay in the gradients' own type."""

from __future__ import annotations

import torch
from torch import Tensor

from rayzero.engine.comm.put import put


class CastCodec:
    """Values rounded to another dtype.

    Args:
        name: as the config calls it.
        dtype: what travels.
    """

    needs_feedback = False
    keeps_zero = True

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def is_identity(self, dtype: torch.dtype) -> bool:
        return dtype is self._dtype

    def coded_bytes(self, numel: int) -> int:
        return numel * self._dtype.itemsize

    def encode(self, values: Tensor, codes: Tensor) -> None:
        codes.view(self._dtype).copy_(values)

    def decode(self, codes: Tensor, out: Tensor, *, add: bool) -> None:
        put(out, codes.view(self._dtype), add=add)

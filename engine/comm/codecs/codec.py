"""What a codec is, and the blocks that codecs cut values into."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 20  # on CPUs: temporaries stay in the cache, and are no fresh pages


class Codec(Protocol):
    """Turns a flat tensor into fewer bytes and back, in the same way on every rank.

    Lengths are multiples of 32 elements, as every part of a unit is. What is not finite stays so:
    the step's vote must see it.

    Attributes:
        name: as the config calls it.
        needs_feedback: whether training converges only if what coding lost is added to the next
            values (error feedback).
        keeps_zero: whether a zero is zero again, so that padding stays padding.
    """

    name: str
    needs_feedback: bool
    keeps_zero: bool

    def is_identity(self, dtype: torch.dtype) -> bool:
        """Whether values of this dtype are their own codes."""

    def coded_bytes(self, numel: int) -> int:
        """The length of `numel` values' codes; a multiple of 4."""

    def encode(self, values: Tensor, codes: Tensor) -> None:
        """Writes the codes of `values` (flat, floating) to `codes` (uint8, `coded_bytes` long)."""

    def decode(self, codes: Tensor, out: Tensor, *, add: bool) -> None:
        """What `codes` stand for replaces `out`, or is added to it."""


def chunks(numel: int, device: torch.device, multiple: int) -> list[slice]:
    """Stretches to code one after another: on CPUs such as fit a cache, elsewhere all at once.

    Args:
        multiple: every stretch but the last is a multiple of this many elements.
    """
    if device.type != "cpu":
        return [slice(0, numel)]
    step = max(1, CHUNK_BYTES // 4 // multiple) * multiple
    return [slice(start, min(start + step, numel)) for start in range(0, numel, step)]


def rows(values: Tensor, block: int) -> list[Tensor]:
    """A flat tensor as (blocks, block), and what is left at its end as (1, rest). Views."""
    whole = values.numel() // block * block
    found = [values[:whole].view(-1, block)] if whole else []
    return [*found, values[whole:].view(1, -1)] if whole < values.numel() else found


class Blocked:
    """What codecs have in common whose codes are the scales of blocks (float32), and a few bits a
    value behind them.

    Args:
        block: values that share a scale.
    """

    def __init__(self, block: int) -> None:
        self._block = block

    def is_identity(self, dtype: torch.dtype) -> bool:
        return False

    def _blocks(self, numel: int) -> int:
        return -(-numel // self._block)

    def _split(self, codes: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The scales, and the rest."""
        at = 4 * self._blocks(numel)
        return codes[:at].view(torch.float32), codes[at:]

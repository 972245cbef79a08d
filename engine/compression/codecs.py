"""Codec, cast, int8, sign.

What a codec is, and the blocks that codecs cut values into.

A narrower (or wider) floating type on the wire; sums stay in the gradients' own type.

Eight bits a value and one scale a block (Dettmers 2016; Wang et al. 2023, "ZeRO++").

One bit a value and one scale a block (Seide et al. 2014, "1-Bit Stochastic Gradient Descent";
Karimireddy et al. 2019, "Error Feedback Fixes SignSGD").
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rayzero.engine.comm.backend import copy_or_add_

CODEC_CHUNK_BYTES = 1 << 20  # on CPUs: temporaries stay in the cache, and are no fresh pages


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
    needs_error_feedback: bool
    keeps_zero: bool

    def is_identity(self, dtype: torch.dtype) -> bool:
        """Whether values of this dtype are their own codes."""

    def payload_bytes(self, numel: int) -> int:
        """The length of `numel` values' codes; a multiple of 4."""

    def encode(self, values: Tensor, codes: Tensor) -> None:
        """Writes the codes of `values` (flat, floating) to `codes` (uint8, `coded_bytes` long)."""

    def decode(self, codes: Tensor, out: Tensor, *, add: bool) -> None:
        """What `codes` stand for replaces `out`, or is added to it."""


def chunk_slices(numel: int, device: torch.device, multiple: int) -> list[slice]:
    """Stretches to code one after another: on CPUs such as fit a cache, elsewhere all at once.

    Args:
        multiple: every stretch but the last is a multiple of this many elements.
    """
    if device.type != "cpu":
        return [slice(0, numel)]
    step = max(1, CODEC_CHUNK_BYTES // 4 // multiple) * multiple
    return [slice(start, min(start + step, numel)) for start in range(0, numel, step)]


def split_into_blocks(values: Tensor, block: int) -> list[Tensor]:
    """A flat tensor as (blocks, block), and what is left at its end as (1, rest). Views."""
    whole = values.numel() // block * block
    found = [values[:whole].view(-1, block)] if whole else []
    return [*found, values[whole:].view(1, -1)] if whole < values.numel() else found


class BlockScaledCodec:
    """What codecs have in common whose codes are the scales of blocks (float32), and a few bits a
    value behind them.

    Args:
        block: values that share a scale.
    """

    def __init__(self, block: int) -> None:
        self._block = block

    def is_identity(self, dtype: torch.dtype) -> bool:
        return False

    def _block_count(self, numel: int) -> int:
        return -(-numel // self._block)

    def _split_payload(self, codes: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The scales, and the rest."""
        at = 4 * self._block_count(numel)
        return codes[:at].view(torch.float32), codes[at:]


class CastCodec:
    """Values rounded to another dtype.

    Args:
        name: as the config calls it.
        dtype: what travels.
    """

    needs_error_feedback = False
    keeps_zero = True

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def is_identity(self, dtype: torch.dtype) -> bool:
        return dtype is self._dtype

    def payload_bytes(self, numel: int) -> int:
        return numel * self._dtype.itemsize

    def encode(self, values: Tensor, codes: Tensor) -> None:
        codes.view(self._dtype).copy_(values)

    def decode(self, codes: Tensor, out: Tensor, *, add: bool) -> None:
        copy_or_add_(out, codes.view(self._dtype), add=add)


INT8_MAX = 127.0


class Int8Codec(BlockScaledCodec):
    """Each block's values as multiples of its largest magnitude / 127, rounded to nearest.

    A part's codes: its blocks' scales (float32), then one int8 a value.

    Args:
        block: values that share a scale.
    """

    name = "int8"
    needs_error_feedback = False
    keeps_zero = True

    def __init__(self, block: int = 256) -> None:
        super().__init__(block)

    def payload_bytes(self, numel: int) -> int:
        return 4 * self._block_count(numel) + numel

    def encode(self, values: Tensor, codes: Tensor) -> None:
        scales, numbers = self._split_payload(codes, values.numel())
        for chunk in chunk_slices(values.numel(), values.device, self._block):
            here = scales[self._block_count(chunk.start) : self._block_count(chunk.stop)]
            at = 0
            for values_2d, numbers_2d in zip(
                split_into_blocks(values[chunk], self._block),
                split_into_blocks(numbers[chunk], self._block),
                strict=True,
            ):
                largest = values_2d.abs().amax(1)
                scale = here[at : at + len(largest)]
                scale.copy_(largest / INT8_MAX)
                at += len(largest)
                # A block of zeros has scale 0, and zeros for codes.
                factor = scale.where(scale == 0, 1 / scale).unsqueeze(1)
                numbers_2d.copy_((values_2d * factor).round_().clamp_(-INT8_MAX, INT8_MAX))

    def decode(self, codes: Tensor, out: Tensor, *, add: bool) -> None:
        scales, numbers = self._split_payload(codes, out.numel())
        for chunk in chunk_slices(out.numel(), out.device, self._block):
            here = scales[self._block_count(chunk.start) : self._block_count(chunk.stop)]
            at = 0
            for out_2d, numbers_2d in zip(
                split_into_blocks(out[chunk], self._block),
                split_into_blocks(numbers[chunk], self._block),
                strict=True,
            ):
                scale = here[at : at + len(out_2d)].unsqueeze(1)
                at += len(out_2d)
                copy_or_add_(out_2d, numbers_2d * scale, add=add)

    def _split_payload(self, codes: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        scales, numbers = super()._split_payload(codes, numel)
        return scales, numbers.view(torch.int8)


# Eight bytes of 0 or 1, times this, have their bits in the highest byte, the first one lowest.
_PACK_BITS_MULTIPLIER = 0x0102040810204080


class SignCodec(BlockScaledCodec):
    """Each value as its sign, times the mean magnitude of its block.

    A part's codes: its blocks' scales (float32), then one bit a value, the first one lowest.

    Args:
        block: values that share a scale.
    """

    name = "sign"
    needs_error_feedback = True
    keeps_zero = False

    def __init__(self, block: int = 64) -> None:
        super().__init__(block)
        self._sign_tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def payload_bytes(self, numel: int) -> int:
        return 4 * self._block_count(numel) + numel // 8

    def encode(self, values: Tensor, codes: Tensor) -> None:
        scales, packed = self._split_payload(codes, values.numel())
        for chunk in chunk_slices(values.numel(), values.device, self._block):
            part = values[chunk]
            means = [one.abs().mean(1) for one in split_into_blocks(part, self._block)]
            scales[self._block_count(chunk.start) : self._block_count(chunk.stop)].copy_(
                torch.cat(means)
            )
            bits = (part >= 0).view(torch.int64)
            packed[_packed_slice(chunk)].copy_(((bits * _PACK_BITS_MULTIPLIER) >> 56) & 255)

    def decode(self, codes: Tensor, out: Tensor, *, add: bool) -> None:
        scales, packed = self._split_payload(codes, out.numel())
        table = self._sign_table(out.device, out.dtype)
        for chunk in chunk_slices(out.numel(), out.device, self._block):
            signs = table[packed[_packed_slice(chunk)].long()].view(-1)
            here = scales[self._block_count(chunk.start) : self._block_count(chunk.stop)].to(
                out.dtype
            )
            at = 0
            for out_2d, signs_2d in zip(
                split_into_blocks(out[chunk], self._block),
                split_into_blocks(signs, self._block),
                strict=True,
            ):
                copy_or_add_(
                    out_2d, signs_2d.mul_(here[at : at + len(out_2d)].unsqueeze(1)), add=add
                )
                at += len(out_2d)

    def _sign_table(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The eight signs of every byte, (256, 8)."""
        key = device, dtype
        if key not in self._sign_tables:
            numbers = torch.arange(256, device=device).unsqueeze(1)
            places = torch.arange(8, device=device)
            self._sign_tables[key] = ((numbers >> places & 1) * 2 - 1).to(dtype)
        return self._sign_tables[key]


def _packed_slice(chunk: slice) -> slice:
    return slice(chunk.start // 8, chunk.stop // 8)

"""Codecs: lossy encodings of gradients and weights for communication, and their registry.

A new codec needs a class and a row of `CODECS` here, its name in the config's `Literal`, and a line
in docs/config.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from rayzero.engine.comm.backend import copy_or_add_

CODEC_CHUNK_BYTES = 1 << 20  # encoded at once on CPUs, so that temporaries stay in the cache
INT8_MAX = 127.0
# The highest byte of the product of this number and eight bytes of 0 or 1 (as an int64) has one bit
# for each byte, that of the first byte lowest.
_PACK_BITS_MULTIPLIER = 0x0102040810204080


class Codec:
    """Encodes a flat tensor into fewer bytes and decodes it, with the same result on every rank.

    Lengths are multiples of 32 elements, as every part of a unit is. Non-finite values must stay
    non-finite, because the step's vote has to see them.

    Attributes:
        name: the codec's name in the config.
        needs_error_feedback: training converges only if the encoding error is added to the next
            values.
        keeps_zero: a zero is decoded as zero, so padding stays zero.
    """

    name: str
    needs_error_feedback = False
    keeps_zero = True

    def is_identity(self, dtype: torch.dtype) -> bool:
        """Returns whether values of this dtype are sent unchanged."""
        return False

    def payload_bytes(self, numel: int) -> int:
        """Returns the bytes of `numel` encoded values, a multiple of 4."""
        raise NotImplementedError

    def encode(self, values: Tensor, payload: Tensor) -> None:
        """Encodes `values` (flat, floating) into `payload` (uint8, `payload_bytes` long)."""
        raise NotImplementedError

    def decode(self, payload: Tensor, out: Tensor, *, add: bool) -> None:
        """Decodes values, which replace `out` or are added to it."""
        raise NotImplementedError


class CastCodec(Codec):
    """Casts values to the payload's `dtype`. Reductions are computed in the gradients' dtype."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def is_identity(self, dtype: torch.dtype) -> bool:
        return dtype is self._dtype

    def payload_bytes(self, numel: int) -> int:
        return numel * self._dtype.itemsize

    def encode(self, values: Tensor, payload: Tensor) -> None:
        payload.view(self._dtype).copy_(values)

    def decode(self, payload: Tensor, out: Tensor, *, add: bool) -> None:
        copy_or_add_(out, payload.view(self._dtype), add=add)


class BlockScaledCodec(Codec):
    """Base of codecs with a scale per block. A payload has one scale (float32) for each block of
    `block` values, then a few bits per value."""

    def __init__(self, block: int) -> None:
        self._block = block

    def _scale_bytes(self, numel: int) -> int:
        return 4 * -(-numel // self._block)

    def _split_payload(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Returns views of the payload's scales and of its encoded values."""
        start = self._scale_bytes(numel)
        return payload[:start].view(torch.float32), payload[start:]

    def _blocks(self, values: Tensor, scales: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields (range, its values with one row per block, its scales as a column) for consecutive
        ranges. On CPUs a range fits the cache. A last, shorter block is a range of its own.
        """
        numel, block = values.numel(), self._block
        whole = numel // block * block
        on_cpu = values.device.type == "cpu"
        step = max(1, CODEC_CHUNK_BYTES // 4 // block) * block if on_cpu else max(whole, 1)
        edges = [*range(0, whole, step), whole, numel]
        for start, stop in pairwise(edges):
            if start < stop:
                rows = values[start:stop].view(-1, min(block, stop - start))
                first = start // block
                yield slice(start, stop), rows, scales[first : first + len(rows)].unsqueeze(1)


class Int8Codec(BlockScaledCodec):
    """Encodes a block's values as multiples of its largest magnitude / 127, rounded to nearest
    (Dettmers 2016; Wang et al. 2023, "ZeRO++").

    Payload: the blocks' scales (float32), then one int8 per value.
    """

    name = "int8"

    def payload_bytes(self, numel: int) -> int:
        return self._scale_bytes(numel) + numel

    def encode(self, values: Tensor, payload: Tensor) -> None:
        scales, numbers = self._split_payload(payload, values.numel())
        for span, rows, scale in self._blocks(values, scales):
            scale.copy_(rows.abs().amax(1, keepdim=True) / INT8_MAX)
            factor = scale.where(scale == 0, 1 / scale)  # a block of zeros has scale 0
            rounded = (rows * factor).round_().clamp_(-INT8_MAX, INT8_MAX)
            numbers[span].view(torch.int8).view_as(rows).copy_(rounded)

    def decode(self, payload: Tensor, out: Tensor, *, add: bool) -> None:
        scales, numbers = self._split_payload(payload, out.numel())
        for span, rows, scale in self._blocks(out, scales):
            copy_or_add_(rows, numbers[span].view(torch.int8).view_as(rows) * scale, add=add)


class SignCodec(BlockScaledCodec):
    """Encodes a value as its sign, times the mean magnitude of its block (Seide et al. 2014, "1-Bit
    Stochastic Gradient Descent"; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD").

    Payload: the blocks' scales (float32), then one bit per value, lowest bit first.
    """

    name = "sign"
    needs_error_feedback = True
    keeps_zero = False

    def __init__(self, block: int) -> None:
        super().__init__(block)
        self._sign_tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def payload_bytes(self, numel: int) -> int:
        return self._scale_bytes(numel) + numel // 8

    def encode(self, values: Tensor, payload: Tensor) -> None:
        scales, packed = self._split_payload(payload, values.numel())
        for span, rows, scale in self._blocks(values, scales):
            scale.copy_(rows.abs().mean(1, keepdim=True))
            bits = (values[span] >= 0).view(torch.int64)
            packed[_packed_slice(span)].copy_(((bits * _PACK_BITS_MULTIPLIER) >> 56) & 255)

    def decode(self, payload: Tensor, out: Tensor, *, add: bool) -> None:
        scales, packed = self._split_payload(payload, out.numel())
        table = self._sign_table(out.device, out.dtype)
        for span, rows, scale in self._blocks(out, scales.to(out.dtype)):
            signs = table[packed[_packed_slice(span)].long()].view_as(rows)
            copy_or_add_(rows, signs.mul_(scale), add=add)

    def _sign_table(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns the eight signs that each byte stands for, of shape (256, 8)."""
        key = device, dtype
        if key not in self._sign_tables:
            numbers = torch.arange(256, device=device).unsqueeze(1)
            shifts = torch.arange(8, device=device)
            self._sign_tables[key] = ((numbers >> shifts & 1) * 2 - 1).to(dtype)
        return self._sign_tables[key]


def _packed_slice(span: slice) -> slice:
    return slice(span.start // 8, span.stop // 8)


CODECS: Mapping[str, Callable[[int | None], Codec]] = {
    "fp32": lambda _: CastCodec("fp32", torch.float32),
    "fp16": lambda _: CastCodec("fp16", torch.float16),
    "bf16": lambda _: CastCodec("bf16", torch.bfloat16),
    "int8": lambda block_size: Int8Codec(block_size or 256),
    "sign": lambda block_size: SignCodec(block_size or 64),
}
"""Functions by the config's names. Each makes a codec, given a block size or None (default)."""

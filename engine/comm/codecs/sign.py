"""One bit a value and one scale a block (Seide et al. 2014, "1-Bit Stochastic Gradient Descent";
Karimireddy et al. 2019, "Error Feedback Fixes SignSGD").
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayzero.engine.comm.codecs.codec import Blocked, chunks, rows
from rayzero.engine.comm.put import put

# Eight bytes of 0 or 1, times this, have their bits in the highest byte, the first one lowest.
_GATHER_BITS = 0x0102040810204080


class SignCodec(Blocked):
    """Each value as its sign, times the mean magnitude of its block.

    A part's codes: its blocks' scales (float32), then one bit a value, the first one lowest.

    Args:
        block: values that share a scale.
    """

    name = "sign"
    needs_feedback = True
    keeps_zero = False

    def __init__(self, block: int = 64) -> None:
        super().__init__(block)
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def coded_bytes(self, numel: int) -> int:
        return 4 * self._blocks(numel) + numel // 8

    def encode(self, values: Tensor, codes: Tensor) -> None:
        scales, packed = self._split(codes, values.numel())
        for chunk in chunks(values.numel(), values.device, self._block):
            part = values[chunk]
            means = [one.abs().mean(1) for one in rows(part, self._block)]
            scales[self._blocks(chunk.start) : self._blocks(chunk.stop)].copy_(torch.cat(means))
            bits = (part >= 0).view(torch.int64)
            packed[_eighth(chunk)].copy_(((bits * _GATHER_BITS) >> 56) & 255)

    def decode(self, codes: Tensor, out: Tensor, *, add: bool) -> None:
        scales, packed = self._split(codes, out.numel())
        table = self._table(out.device, out.dtype)
        for chunk in chunks(out.numel(), out.device, self._block):
            signs = table[packed[_eighth(chunk)].long()].view(-1)
            here = scales[self._blocks(chunk.start) : self._blocks(chunk.stop)].to(out.dtype)
            at = 0
            for out_2d, signs_2d in zip(
                rows(out[chunk], self._block), rows(signs, self._block), strict=True
            ):
                put(out_2d, signs_2d.mul_(here[at : at + len(out_2d)].unsqueeze(1)), add=add)
                at += len(out_2d)

    def _table(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The eight signs of every byte, (256, 8)."""
        key = device, dtype
        if key not in self._tables:
            numbers = torch.arange(256, device=device).unsqueeze(1)
            places = torch.arange(8, device=device)
            self._tables[key] = ((numbers >> places & 1) * 2 - 1).to(dtype)
        return self._tables[key]


def _eighth(chunk: slice) -> slice:
    return slice(chunk.start // 8, chunk.stop // 8)

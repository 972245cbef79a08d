"""Eight bits a value and one scale a block (Dettmers 2016; Wang et al. 2023, "ZeRO++")."""

from __future__ import annotations

import torch
from torch import Tensor

from rayzero.engine.comm.codecs.codec import Blocked, chunks, rows
from rayzero.engine.comm.put import put

LARGEST = 127.0


class Int8Codec(Blocked):
    """Each block's values as multiples of its largest magnitude / 127, rounded to nearest.

    A part's codes: its blocks' scales (float32), then one int8 a value.

    Args:
        block: values that share a scale.
    """

    name = "int8"
    needs_feedback = False
    keeps_zero = True

    def __init__(self, block: int = 256) -> None:
        super().__init__(block)

    def coded_bytes(self, numel: int) -> int:
        return 4 * self._blocks(numel) + numel

    def encode(self, values: Tensor, codes: Tensor) -> None:
        scales, numbers = self._split(codes, values.numel())
        for chunk in chunks(values.numel(), values.device, self._block):
            here = scales[self._blocks(chunk.start) : self._blocks(chunk.stop)]
            at = 0
            for values_2d, numbers_2d in zip(
                rows(values[chunk], self._block), rows(numbers[chunk], self._block), strict=True
            ):
                largest = values_2d.abs().amax(1)
                scale = here[at : at + len(largest)]
                scale.copy_(largest / LARGEST)
                at += len(largest)
                # A block of zeros has scale 0, and zeros for codes.
                factor = scale.where(scale == 0, 1 / scale).unsqueeze(1)
                numbers_2d.copy_((values_2d * factor).round_().clamp_(-LARGEST, LARGEST))

    def decode(self, codes: Tensor, out: Tensor, *, add: bool) -> None:
        scales, numbers = self._split(codes, out.numel())
        for chunk in chunks(out.numel(), out.device, self._block):
            here = scales[self._blocks(chunk.start) : self._blocks(chunk.stop)]
            at = 0
            for out_2d, numbers_2d in zip(
                rows(out[chunk], self._block), rows(numbers[chunk], self._block), strict=True
            ):
                scale = here[at : at + len(out_2d)].unsqueeze(1)
                at += len(out_2d)
                put(out_2d, numbers_2d * scale, add=add)

    def _split(self, codes: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        scales, numbers = super()._split(codes, numel)
        return scales, numbers.view(torch.int8)

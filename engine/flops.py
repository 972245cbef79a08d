"""How much arithmetic a step is, and how much of what the device could do that is.

Method: model flops utilisation as in Chowdhery et al., "PaLM", 2022, appendix B, but for what is
counted: the operations that ran, as `torch.utils.flop_counter` sees them, instead of a formula of
the model's size. What activation checkpointing computes again is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.flop_counter import FlopCounterMode

# Dense peak of the tensor cores for bf16 and fp16, in flops a second, from the vendors' data
# sheets; the longer name first. fp32 is reckoned as TF32: half of it.
_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "A10": 125e12,
    "A40": 150e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """What a device could do in a second; None when that is not known, as for CPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((peak for model, peak in _PEAKS.items() if model in name), None)
    if peak is None or dtype.itemsize == 2:
        return peak
    return peak / 2 if dtype is torch.float32 else None


class FlopMeter:
    """Counts the first micro-step of a run; later ones are the same.

    Args:
        wanted: whether to count at all. torch imports its compiler for it, which takes seconds, so
            it is done where the device's peak is known, and once.

    Attributes:
        micro_step: flops of forward and backward of one micro-step on this rank; 0 until known.
    """

    def __init__(self, wanted: bool) -> None:
        self.micro_step = 0
        self._wanted = wanted
        self._forward = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward. Only that of a micro-step that gets a backward counts."""
        if not self._wanted or self.micro_step or not torch.is_grad_enabled():
            yield
            return
        with FlopCounterMode(display=False) as counter:
            yield
        self._forward += counter.get_total_flops()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward."""
        if self.micro_step or not self._forward:
            yield
            return
        with FlopCounterMode(display=False) as counter:
            yield
        self.micro_step = self._forward + counter.get_total_flops()

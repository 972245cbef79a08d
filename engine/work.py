"""How much work a step is: tokens, arithmetic, and how much that is of what the device could do.

Method: model flops utilisation as in Chowdhery et al., "PaLM", 2022, appendix B, but for what is
counted: the operations that ran, as `torch.utils.flop_counter` sees them, instead of a formula of
the model's size. What activation checkpointing computes again is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from rayzero.engine.zero.trees import tensors_in

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


class Work:
    """Adds up what a step's micro-steps were. For one rank, from which the others' follow.

    Args:
        micro_steps: in a step.
        peak: flops a second that the device could do; None when that is not known.
    """

    def __init__(self, micro_steps: int, peak: float | None) -> None:
        self._micro_steps = micro_steps
        self._peak = peak
        self._flops = FlopMeter(wanted=peak is not None)
        self._coming = 0  # tokens of a forward that may get a backward
        self._tokens = 0
        self._weight = 0.0

    @contextmanager
    def forward(self, inputs: Any) -> Iterator[None]:
        """Around a forward of `inputs`. Tokens are the elements of the first tensor of integers
        that has a dimension beside the samples'."""
        if torch.is_grad_enabled():
            self._coming = next((one.numel() for one in tensors_in(inputs) if _is_text(one)), 0)
        with self._flops.forward():
            yield

    @contextmanager
    def backward(self, weight: float) -> Iterator[None]:
        """Around the backward of a micro-batch that is this share of the global batch."""
        self._tokens += self._coming
        self._weight += weight
        self._coming = 0
        with self._flops.backward():
            yield

    def step_done(self, step_s: float) -> dict[str, float]:
        """The step's readings, as far as they are known, and a fresh beginning.

        step_tokens and tokens_per_s over all ranks; flops_per_s of this rank; mfu of its device.
        """
        found = {}
        if self._tokens and self._weight:
            found["step_tokens"] = self._tokens / self._weight
            found["tokens_per_s"] = found["step_tokens"] / step_s
        if self._flops.micro_step and self._peak is not None:
            found["flops_per_s"] = self._flops.micro_step * self._micro_steps / step_s
            found["mfu"] = found["flops_per_s"] / self._peak
        self._tokens, self._weight = 0, 0.0
        return found


def _is_text(tensor: torch.Tensor) -> bool:
    return tensor.ndim >= 2 and tensor.dtype in (torch.int64, torch.int32)

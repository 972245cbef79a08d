"""Bytes by class, FLOPs and MFU.

The bytes a rank holds between two steps, by class. Per parameter, W ranks, AdamW:

| stage | fp32 | bf16 with fp32 main weights |
|---|---|---|
| 0 | 4 + 4 + 8 = 16 | 2 + 4 + 4 + 8 = 18 |
| 1 | 4 + 4 + 8/W | 2 + 4 + 12/W |
| 2 | 4 + 12/W | 2 + 16/W |
| 3 | 16/W | 18/W |

and on top, bounded by a few units: slots (weights gathered, gradients in passing) and staging
(parts received from other ranks). What is offloaded is counted apart: in host memory, or in files.

How much work a step is: tokens, arithmetic, and how much that is of what the device could do.

Method: model flops utilisation as in Chowdhery et al., "PaLM", 2022, appendix B, but for what is
counted: the operations that ran, as `torch.utils.flop_counter` sees them, instead of a formula of
the model's size. What activation checkpointing computes again is in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from rayzero.engine.offload.transfer import MemoryKind
from rayzero.engine.optim.sharded_optimizer import ShardedOptimizer
from rayzero.engine.zero.hooks import iter_tensors
from rayzero.engine.zero.runtime import ZeroRuntime


def bytes_by_class(runtime: ZeroRuntime, optimizer: ShardedOptimizer) -> dict[str, int]:
    """Bytes by class; memory that has two uses is counted once, as model weights.

    Classes: model_weights, main_weights (0 where they are the model weights), main_grads,
    optimizer_state, error_feedback (0 without it), second_shards (0 without
    zero_hpz_partition_size), slots, staging. What rests in host memory or in files is not among
    them, but under the same names with `host_` or `disk_` before them, where there is any.
    """
    slots = runtime.grad_buffers.buffers if runtime.grad_buffers is not None else []
    gathered = runtime.gather_buffers.total_bytes if runtime.gather_buffers is not None else 0
    way = runtime.unshard_scheduler.weight_gather if runtime.unshard_scheduler is not None else None
    found = Counter(
        model_weights=sum(one.nbytes for one in runtime.ungrouped_params),
        main_weights=0,
        main_grads=0,
        optimizer_state=0,
        error_feedback=sum(one.feedback.nbytes for one in runtime.grad_reduction.residuals)
        + sum(one.nbytes for _, one in runtime.grad_reduction.replicated_state()),
        second_shards=way.secondary_bytes if way is not None else 0,
        slots=sum(one.nbytes for one in slots) + gathered,
        staging=runtime.collectives.staging_bytes
        + runtime.grad_reduction.buffer_bytes
        + (way.buffer_bytes if way is not None else 0),
    )
    for name, place, tensor in _persistent_tensors(runtime, optimizer):
        found[name if place is MemoryKind.DEVICE else f"{place.value}_{name}"] += tensor.nbytes
    if runtime.offload.staging_bytes:
        found["host_staging"] = runtime.offload.staging_bytes
    return dict(found)


def _persistent_tensors(
    runtime: ZeroRuntime, optimizer: ShardedOptimizer
) -> Iterable[tuple[str, MemoryKind, Tensor]]:
    """All of the engine's own tensors that stay between two steps, each once."""
    for unit in runtime.units:
        yield "model_weights", unit.weights.memory_kind, unit.weights.persistent_tensor
        if unit.main_weights is not None and _storage_address(
            unit.main_weights
        ) != _storage_address(unit.weights.persistent_tensor):
            yield "main_weights", unit.state_store.memory_kind, unit.main_weights
        if unit.grads is not None:
            for place, tensor in unit.grads.persistent_tensors.items():
                yield "main_grads", place, tensor
    for run in optimizer.shards:
        for value in optimizer.torch_optimizer.state.get(run.weight, {}).values():
            if isinstance(value, Tensor) and value.ndim > 0:
                yield "optimizer_state", run.unit.state_store.memory_kind, value


def _storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# Dense peak of the tensor cores for bf16 and fp16, in flops a second, from the vendors' data
# sheets; the longer name first. fp32 is reckoned as TF32: half of it.
_PEAK_FLOPS = {
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
    peak = next((peak for model, peak in _PEAK_FLOPS.items() if model in name), None)
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
        self.micro_step_flops = 0
        self._enabled = wanted
        self._forward_flops = 0

    @contextmanager
    def track_forward(self) -> Iterator[None]:
        """Around a forward. Only that of a micro-step that gets a backward counts."""
        if not self._enabled or self.micro_step_flops or not torch.is_grad_enabled():
            yield
            return
        with FlopCounterMode(display=False) as counter:
            yield
        self._forward_flops += counter.get_total_flops()

    @contextmanager
    def track_backward(self) -> Iterator[None]:
        """Around the backward."""
        if self.micro_step_flops or not self._forward_flops:
            yield
            return
        with FlopCounterMode(display=False) as counter:
            yield
        self.micro_step_flops = self._forward_flops + counter.get_total_flops()


class StepWork:
    """Adds up what a step's micro-steps were. For one rank, from which the others' follow.

    Args:
        micro_steps: in a step.
        peak: flops a second that the device could do; None when that is not known.
    """

    def __init__(self, micro_steps: int, peak: float | None) -> None:
        self._micro_steps = micro_steps
        self._peak_flops = peak
        self._flop_meter = FlopMeter(wanted=peak is not None)
        self._pending_tokens = 0  # tokens of a forward that may get a backward
        self._tokens = 0
        self._weight = 0.0

    @contextmanager
    def track_forward(self, inputs: Any) -> Iterator[None]:
        """Around a forward of `inputs`. Tokens are the elements of the first tensor of integers
        that has a dimension beside the samples'."""
        if torch.is_grad_enabled():
            self._pending_tokens = next(
                (one.numel() for one in iter_tensors(inputs) if _is_token_ids(one)), 0
            )
        with self._flop_meter.track_forward():
            yield

    @contextmanager
    def track_backward(self, weight: float) -> Iterator[None]:
        """Around the backward of a micro-batch that is this share of the global batch."""
        self._tokens += self._pending_tokens
        self._weight += weight
        self._pending_tokens = 0
        with self._flop_meter.track_backward():
            yield

    def end_step(self, step_s: float) -> dict[str, float]:
        """The step's readings, as far as they are known, and a fresh beginning.

        step_tokens and tokens_per_s over all ranks; flops_per_s of this rank; mfu of its device.
        """
        found = {}
        if self._tokens and self._weight:
            found["step_tokens"] = self._tokens / self._weight
            found["tokens_per_s"] = found["step_tokens"] / step_s
        if self._flop_meter.micro_step_flops and self._peak_flops is not None:
            found["flops_per_s"] = self._flop_meter.micro_step_flops * self._micro_steps / step_s
            found["mfu"] = found["flops_per_s"] / self._peak_flops
        self._tokens, self._weight = 0, 0.0
        return found


def _is_token_ids(tensor: torch.Tensor) -> bool:
    return tensor.ndim >= 2 and tensor.dtype in (torch.int64, torch.int32)

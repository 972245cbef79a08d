"""Persistent bytes by class, and tokens, FLOPs and MFU of a step.

Bytes that a rank holds between two steps, per parameter on W ranks with AdamW:

| stage | fp32 | bf16 with fp32 main weights |
|---|---|---|
| 0 | 4 + 4 + 8 = 16 | 2 + 4 + 4 + 8 = 18 |
| 1 | 4 + 4 + 8/W | 2 + 4 + 12/W |
| 2 | 4 + 12/W | 2 + 16/W |
| 3 | 16/W | 18/W |

plus, bounded by a few units: slots (gathered weights), grad_slots (gradients before their
reduction: three parts at most) and staging (parts received from other ranks). Offloaded bytes, in
host memory or files, are counted separately.

MFU is that of Chowdhery et al., "PaLM", 2022, appendix B. The operations of an eager model are
counted by `torch.utils.flop_counter`, recomputation by activation checkpointing included. Where
torch.compile is used, flops are estimated from the model's size (`flops_per_token`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rayzero.engine.compiling import uses_compiler
from rayzero.engine.device import get_device
from rayzero.engine.offload.transfer import MemoryKind
from rayzero.engine.optim.sharded_optimizer import ShardedOptimizer
from rayzero.engine.tensor_tree import iter_tensors, storage_id
from rayzero.engine.zero.runtime import ZeroRuntime


def bytes_by_class(runtime: ZeroRuntime, optimizer: ShardedOptimizer) -> dict[str, int]:
    """Returns bytes by class; memory with two uses is counted once, as model weights.

    Classes: model_weights, main_weights (0 where they are the model weights), main_grads,
    optimizer_state, error_feedback (0 without it), second_shards (0 without
    zero_hpz_partition_size), slots, grad_slots, staging. Bytes in host memory or files have the
    same names with the prefix `host_` or `disk_`.
    """
    scheduler, reduction = runtime.unshard_scheduler, runtime.grad_reduction
    grad_buffers = pool.buffers if (pool := runtime.reducer.buffer_pool) is not None else []
    total = Counter(
        model_weights=sum(param.nbytes for param in runtime.ungrouped_params.values()),
        main_weights=0,
        main_grads=0,
        error_feedback=sum(
            residual.nbytes for feedback in reduction.residuals for residual in feedback.tensors
        )
        + sum(tensor.nbytes for _, tensor in reduction.replicated_state()),
        optimizer_state=sum(tensor.nbytes for _, tensor in optimizer.replicated_state()),
        second_shards=scheduler.weight_gather.secondary_bytes,
        slots=scheduler.buffers.total_bytes,
        grad_slots=sum(buffer.nbytes for buffer in grad_buffers),
        staging=runtime.collectives.staging_bytes
        + reduction.buffer_bytes
        + scheduler.weight_gather.buffer_bytes,
    )
    for name, kind, tensor in _persistent_tensors(runtime, optimizer):
        total[name if kind is MemoryKind.DEVICE else f"{kind.value}_{name}"] += tensor.nbytes
    if runtime.offload.staging_bytes:
        total["host_staging"] = runtime.offload.staging_bytes
    return dict(total)


def _persistent_tensors(
    runtime: ZeroRuntime, optimizer: ShardedOptimizer
) -> Iterator[tuple[str, MemoryKind, Tensor]]:
    """Yields (class, kind of memory, tensor) for each of the engine's tensors that persist between
    two steps, each once."""
    for unit in runtime.units:
        weights = unit.weights.persistent_tensor
        yield "model_weights", unit.weights.memory_kind, weights
        main = unit.main_weights
        if main is not None and storage_id(main) != storage_id(weights):
            yield "main_weights", unit.state_store.memory_kind, main
        if unit.grads is not None:
            for kind, tensor in unit.grads.persistent_tensors.items():
                yield "main_grads", kind, tensor
    for shard in optimizer.shards:
        for value in optimizer.state_tensors(shard).values():
            yield "optimizer_state", shard.unit.state_store.memory_kind, value


# Dense peak of the tensor cores for bf16 and fp16, in flops a second, from the vendors' data
# sheets; a longer name precedes its prefix. fp32 counts as TF32, which has half of this.
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
    """Returns a device's peak in flops per second; None if unknown, as for CPUs."""
    name = get_device(device).name
    peak = next((peak for model, peak in _PEAK_FLOPS.items() if model in name), None)
    if peak is None or dtype.itemsize == 2:
        return peak
    return peak / 2 if dtype is torch.float32 else None


class _NoModules(nullcontext[None]):
    """A stand-in for a `ModuleTracker`: all operations belong to the model."""

    parents = frozenset({"Global"})


class FlopCount(FlopCounterMode):
    """A flop counter that does not tell modules apart: the hooks which do that hold what activation
    checkpointing recomputes until the end of backward."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker: Any = _NoModules()


def flops_per_token(runtime: ZeroRuntime) -> int:
    """Estimates the flops of a micro-step per token, as if each parameter were multiplied once per
    token.

    A parameter counts 2 flops in forward, 2 for the gradient of the activation, and 2 for its own
    gradient if it is trained (Chowdhery et al., appendix B). Attention's products of activations,
    and recomputation, are left out; all experts of a mixture count, as do embeddings that are only
    looked up.
    """
    trained = sum(unit.layout.logical_numel for unit in runtime.units if unit.grads is not None)
    frozen = sum(unit.layout.logical_numel for unit in runtime.units if unit.grads is None)
    frozen += sum(param.numel() for param in runtime.ungrouped_params.values())
    return 6 * trained + 4 * frozen


def _counter(*, enabled: bool) -> AbstractContextManager[FlopCount | None]:
    return FlopCount() if enabled else nullcontext()


class StepWork:
    """Sums a step's work on this rank, from which the work of all ranks is estimated.

    Flops are determined once, in the second micro-step of a run: later micro-steps have as many,
    until `count_again`. This is done only if the device's peak is known (in flops per second),
    since the counter imports torch's compiler, which takes seconds. In a dispatch mode such as the
    counter, torch.compile leaves a function eager for the rest of the process. Flops are therefore
    counted only if torch.compile was not used by the end of the first micro-step; otherwise they
    are estimated as `flops_per_token` for each token.
    """

    def __init__(self, micro_steps: int, peak: float | None, flops_per_token: int = 0) -> None:
        self.micro_step_flops = 0  # of forward and backward on this rank; 0 until known
        self.micro_steps = micro_steps  # of a step
        # Returns what the step that ends has read of a stream, by source.
        self.take_stream_counts: Callable[[], dict[str, dict[str, int]]] = dict
        self._peak_flops = peak
        self._flops_per_token = flops_per_token
        self._unknown = peak is not None
        self._had_backward = False
        self._is_due = False  # in the micro-step that determines the flops
        self._forward_flops: int | None = None  # None unless counted
        self._pending_tokens = 0  # tokens of a forward that may get a backward
        self._tokens = 0
        self._weight = 0.0

    def count_again(self) -> None:
        """Determines the flops again, in the next micro-step: it may have another size."""
        self._unknown, self._forward_flops = self._peak_flops is not None, None

    @contextmanager
    def track_forward(self, module: nn.Module, inputs: Any) -> Iterator[None]:
        """Encloses a forward of `inputs`, which counts if a backward follows. Tokens are the
        elements of the first integer tensor that has more dimensions than the batch's."""
        if not torch.is_grad_enabled():
            yield
            return
        tensors = [tensor for tensor in iter_tensors(inputs) if tensor.ndim >= 2]
        tokens = [tensor for tensor in tensors if tensor.dtype in (torch.int64, torch.int32)]
        self._pending_tokens = tokens[0].numel() if tokens else 0
        self._is_due = self._unknown and self._had_backward
        with _counter(enabled=self._is_due and not uses_compiler(module)) as counter:
            yield
        if counter is not None:
            self._forward_flops = (self._forward_flops or 0) + counter.get_total_flops()

    @contextmanager
    def track_backward(self, weight: float) -> Iterator[None]:
        """Encloses a backward; `weight` is the micro-batch's share of the global batch."""
        tokens, flops = self._begin_backward(weight), self._forward_flops
        with _counter(enabled=self._is_due and flops is not None) as counter:
            yield
        if counter is not None and flops is not None:
            flops += counter.get_total_flops()
        self._end_backward(tokens, flops)

    def count_backward(self, weight: float) -> None:
        """Counts a backward that is already running, so that `track_backward` cannot enclose it.
        Its flops are taken to be twice those of its forward."""
        tokens, forward = self._begin_backward(weight), self._forward_flops
        self._end_backward(tokens, None if forward is None else 3 * forward)

    def _begin_backward(self, weight: float) -> int:
        """Adds the weight of a backward and the tokens of its forward to the step; returns the
        tokens."""
        tokens, self._pending_tokens = self._pending_tokens, 0
        self._tokens += tokens
        self._weight += weight
        return tokens

    def _end_backward(self, tokens: int, counted: int | None) -> None:
        self._had_backward = True
        if self._is_due:
            self._is_due = self._unknown = False
            self.micro_step_flops = tokens * self._flops_per_token if counted is None else counted

    def end_step(self, step_s: float) -> dict[str, float]:
        """Returns the step's metrics, as far as they are known, and resets the sums.

        The metrics are step_tokens of all ranks, flops_per_s of this rank, mfu of its device.
        """
        metrics = {}
        if self._tokens and self._weight:
            metrics["step_tokens"] = self._tokens / self._weight
        if self.micro_step_flops and self._peak_flops is not None:
            metrics["flops_per_s"] = self.micro_step_flops * self.micro_steps / step_s
            metrics["mfu"] = metrics["flops_per_s"] / self._peak_flops
        self._tokens, self._weight = 0, 0.0
        return metrics

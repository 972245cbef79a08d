"""Stores of main weights and optimizer state: device memory, host memory, files.

| store | main weights, optimizer state | main gradients | update |
|---|---|---|---|
| StateStore | on the device | on the device | all at once |
| HostStore | in host memory | in host memory | unit by unit, on the CPU |
| NvmeStore (`nvme_store`) | in a file | in host memory | chunk by chunk, in a few buffers |

Order of an update. An update begins after the step vote, because clipping and the inf/nan check
need the global norm. So it is all or nothing, as without offload. Gradients were copied to the host
during backward. The CPU updates one chunk while the previous chunk's weights are copied to the
device. An update runs no collectives: the weights of other ranks are gathered after all chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.device import Event
from rayzero.engine.offload.transfer import HostTransfer, MemoryKind
from rayzero.engine.precision.policy import Precision
from rayzero.engine.tensor_tree import storage_id

OptimizerStateMap = MutableMapping[Tensor, dict[str, Any]]  # a torch optimizer's `state`


@dataclass(frozen=True)
class UpdateChunk:
    """Weights that are updated together (DeepSpeed: a sub-group): weights of one offloaded unit, or
    all weights on the device.

    Attributes:
        main: all main weights of the (first) unit on this rank.
        weights: the optimizer's parameters, views of `main`.
        targets: for each of `weights`, the model weights that are copied from it.
    """

    main: Tensor
    weights: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]

    @property
    def numel(self) -> int:
        return sum(weight.numel() for weight in self.weights)


class StateStore:
    """Storage that all units with the same placement share; in this class the device's memory.

    Args:
        device: device that runs the updates.
        separate_memory: whether model weights are in other memory than that of `device`.

    Attributes:
        memory_kind: memory of main weights and optimizer state.
        grad_transfer: copies reduced gradients to host memory; None if they stay on the device.
        chunk_numel: the maximum number of elements of a chunk; None for whole units.
    """

    memory_kind = MemoryKind.DEVICE
    grad_transfer: HostTransfer | None = None
    chunk_numel: int | None = None

    def __init__(
        self, precision: Precision, device: torch.device, *, separate_memory: bool
    ) -> None:
        self._precision = precision
        self._device = device
        self._separate_memory = separate_memory

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        """Returns the main weights for a range of model weights; they may share memory. `original`
        has the values in the model's own dtype, on the device."""
        main = self._precision.main_weights(original, model_weights)
        return original.clone() if self._separate_memory and main is model_weights else main

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocates a tensor of optimizer state in this storage."""
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def update_chunks(
        self, chunks: Sequence[UpdateChunk], state: OptimizerStateMap
    ) -> Iterator[int]:
        """Yields chunk indices. Each chunk must be updated before the next index is requested;
        until then the chunk's weights and state are in memory."""
        yield from range(len(chunks))

    def copy_to_model(self, main: Tensor, model_weights: Tensor) -> None:
        """Copies main weights to model weights, unless the update has done this already."""
        if self._separate_memory:
            # Host memory is pinned, and read only by copies to the device on this stream, or on one
            # that waits for it (`HostShardGather`).
            model_weights.copy_(main, non_blocking=True)
        else:
            self._precision.copy_to_model(main, model_weights)

    @property
    def staging_bytes(self) -> int:
        """Host memory for chunks in flight."""
        return 0

    def close(self) -> None:
        """Stops threads and closes files. Idempotent."""


class HostStore(StateStore):
    """Storage in host memory, which is pinned if a GPU reads it."""

    memory_kind = MemoryKind.HOST

    def __init__(
        self, precision: Precision, transfer: HostTransfer, *, separate_memory: bool
    ) -> None:
        super().__init__(precision, torch.device("cpu"), separate_memory=separate_memory)
        self._transfer = transfer
        self._sent: set[int] = set()  # ids of main weights that updates copied to the model
        self.grad_transfer = transfer if transfer.separate_memory else None

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        main = self._precision.main_weights(original, model_weights)
        in_host_memory = main is model_weights and not self._separate_memory
        if in_host_memory or not self._transfer.separate_memory:
            return main
        return self._transfer.host_zeros(main.numel(), main.dtype).copy_(main)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)  # on the meta device in a memory plan

    def update_chunks(
        self, chunks: Sequence[UpdateChunk], state: OptimizerStateMap
    ) -> Iterator[int]:
        for index, chunk in enumerate(chunks):
            yield index
            self._send_updated(chunk, chunk.weights)

    def copy_to_model(self, main: Tensor, model_weights: Tensor) -> None:
        if id(main) in self._sent:
            self._sent.remove(id(main))
        else:
            self._copy_to_model(main, model_weights)
        self._transfer.sync_compute()

    def _send_updated(self, chunk: UpdateChunk, weights: Sequence[Tensor]) -> list[Event]:
        """Starts to copy an updated chunk to its model weights. `weights` may be overwritten after
        the returned events."""
        pairs = zip(weights, chunk.targets, strict=True)
        events = [self._copy_to_model(weight.detach(), target) for weight, target in pairs]
        self._sent.add(id(chunk.main))
        return events

    def _copy_to_model(self, main: Tensor, model_weights: Tensor) -> Event:
        if storage_id(main) == storage_id(model_weights):
            return Event()
        if self._separate_memory:
            return self._transfer.h2d(main, model_weights)
        self._precision.copy_to_model(main, model_weights)
        return Event()

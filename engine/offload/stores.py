"""Where units' main weights, gradient sums and optimizer state rest, and how an update gets there.

| home | main weights, optimizer state | gradient sums | an update |
|---|---|---|---|
| DeviceStore | on the device | where they are summed | all runs at once |
| HostStore | in host memory | in host memory | unit by unit, on the CPU |
| NvmeStore (`disk_home`) | in a file | in host memory | piece by piece, in a few buffers |

Order of an update. It begins after the vote, because clipping and the inf/nan vote need the whole
norm; so it is all or nothing, as without offload. Gradients were fetched as they arrived, beside
backward. Then piece by piece: the CPU updates one while the weights of the one before travel to the
device. No collective runs in it: other ranks' weights are gathered when all pieces are done.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rayzero.engine.offload.transfer import HostTransfer, MemoryKind
from rayzero.engine.precision.policy import Precision

OptimizerStateMap = MutableMapping[Tensor, dict[str, Any]]  # a torch optimizer's, by parameter


@dataclass(frozen=True)
class UpdateChunk:
    """What is updated at once: runs of one unit.

    Attributes:
        main: all main weights of the unit on this rank.
        weights: the optimizer's parameters, views of `main`.
        targets: the model weights that follow each of them.
    """

    main: Tensor
    weights: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]

    @property
    def numel(self) -> int:
        return sum(weight.numel() for weight in self.weights)


class StateStore(Protocol):
    """One for all units that rest in the same way.

    Attributes:
        place: where main weights and optimizer state rest.
        fetches: through what gradient sums come to host memory; None: they rest where they are
            summed.
        piece_numel: the most elements of a piece; None for whole units.
        staging_bytes: host memory held for pieces on their way.
    """

    memory_kind: MemoryKind
    grad_transfer: HostTransfer | None
    chunk_numel: int | None

    @property
    def staging_bytes(self) -> int: ...

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        """The main weights for a range of model weights; may be the same memory.

        Args:
            original: the values, in the model's own dtype, on the device.
        """

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Where a tensor of optimizer state rests."""

    def update_chunks(
        self, pieces: Sequence[UpdateChunk], state: OptimizerStateMap
    ) -> Iterator[int]:
        """One update: numbers of pieces, each of which is to be updated before the next is asked
        for. Meanwhile its weights and state are where the optimizer can work on them."""

    def copy_to_model(self, main: Tensor, model_weights: Tensor) -> None:
        """The model weights follow the main weights, unless the update has seen to that."""

    def close(self) -> None:
        """Lets go of threads and files. Safe to repeat."""


class DeviceStore:
    """On the device, as without offload. Model weights may rest in host memory all the same."""

    memory_kind = MemoryKind.DEVICE
    grad_transfer: HostTransfer | None = None
    chunk_numel: int | None = None
    staging_bytes = 0

    def __init__(
        self, precision: Precision, link: HostTransfer, device: torch.device, rest: MemoryKind
    ) -> None:
        self._precision = precision
        self._device = device
        self._separate_memory = (
            link.separate_memory and rest is MemoryKind.HOST
        )  # model weights are in other memory

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        main = self._precision.main_weights(original, model_weights)
        return original.clone() if self._separate_memory and main is model_weights else main

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def update_chunks(
        self, pieces: Sequence[UpdateChunk], state: OptimizerStateMap
    ) -> Iterator[int]:
        yield from range(len(pieces))

    def copy_to_model(self, main: Tensor, model_weights: Tensor) -> None:
        if self._separate_memory:
            model_weights.copy_(main)  # the host waits: the next gather reads host memory
        else:
            self._precision.copy_to_model(main, model_weights)

    def close(self) -> None:
        return


class HostStore:
    """In host memory: pinned where a GPU reads it."""

    memory_kind = MemoryKind.HOST
    chunk_numel: int | None = None

    def __init__(self, precision: Precision, link: HostTransfer, rest: MemoryKind) -> None:
        self._precision = precision
        self._transfer = link
        self._separate_memory = (
            link.separate_memory and rest is MemoryKind.DEVICE
        )  # model weights are in other memory
        self._sent: set[int] = set()  # by the main weights' identity
        self.grad_transfer = link if link.separate_memory else None

    @property
    def staging_bytes(self) -> int:
        return 0

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        main = self._precision.main_weights(original, model_weights)
        if not self._transfer.separate_memory or (
            main is model_weights and not self._separate_memory
        ):
            return main
        return self._transfer.host_zeros(main.numel(), main.dtype).copy_(main)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def update_chunks(
        self, pieces: Sequence[UpdateChunk], state: OptimizerStateMap
    ) -> Iterator[int]:
        for number, piece in enumerate(pieces):
            yield number
            self._send_updated(piece, piece.weights)

    def copy_to_model(self, main: Tensor, model_weights: Tensor) -> None:
        if id(main) in self._sent:
            self._sent.remove(id(main))
        else:
            self._copy_to_model(main, model_weights)
        self._transfer.sync_compute()

    def close(self) -> None:
        return

    def _send_updated(self, piece: UpdateChunk, weights: Sequence[Tensor]) -> None:
        """A piece was updated: its model weights set out."""
        for weight, target in zip(weights, piece.targets, strict=True):
            self._copy_to_model(weight.detach(), target)
        self._sent.add(id(piece.main))

    def _copy_to_model(self, main: Tensor, model_weights: Tensor) -> None:
        if main.data_ptr() == model_weights.data_ptr():
            return
        if self._separate_memory:
            self._transfer.h2d(main, model_weights)
        else:
            self._precision.copy_to_model(main, model_weights)

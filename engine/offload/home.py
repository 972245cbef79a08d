"""Where units' main weights, gradient sums and optimizer state rest, and how an update gets there.

| home | main weights, optimizer state | gradient sums | an update |
|---|---|---|---|
| DeviceHome | on the device | where they are summed | all runs at once |
| HostHome | in host memory | in host memory | unit by unit, on the CPU |
| DiskHome (`disk_home`) | in a file | in host memory | piece by piece, in a few buffers |

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

from rayzero.engine.offload.link import Link
from rayzero.engine.offload.place import Place
from rayzero.engine.precision.policy import Precision

State = MutableMapping[Tensor, dict[str, Any]]  # a torch optimizer's, by parameter


@dataclass(frozen=True)
class Piece:
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


class Home(Protocol):
    """One for all units that rest in the same way.

    Attributes:
        place: where main weights and optimizer state rest.
        fetches: through what gradient sums come to host memory; None: they rest where they are
            summed.
        piece_numel: the most elements of a piece; None for whole units.
        staging_bytes: host memory held for pieces on their way.
    """

    place: Place
    fetches: Link | None
    piece_numel: int | None

    @property
    def staging_bytes(self) -> int: ...

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        """The main weights for a range of model weights; may be the same memory.

        Args:
            original: the values, in the model's own dtype, on the device.
        """

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Where a tensor of optimizer state rests."""

    def rounds(self, pieces: Sequence[Piece], state: State) -> Iterator[int]:
        """One update: numbers of pieces, each of which is to be updated before the next is asked
        for. Meanwhile its weights and state are where the optimizer can work on them."""

    def publish(self, main: Tensor, model_weights: Tensor) -> None:
        """The model weights follow the main weights, unless the update has seen to that."""

    def close(self) -> None:
        """Lets go of threads and files. Safe to repeat."""


class DeviceHome:
    """On the device, as without offload. Model weights may rest in host memory all the same."""

    place = Place.DEVICE
    fetches: Link | None = None
    piece_numel: int | None = None
    staging_bytes = 0

    def __init__(self, precision: Precision, link: Link, device: torch.device, rest: Place) -> None:
        self._precision = precision
        self._device = device
        self._across = link.apart and rest is Place.HOST  # model weights are in other memory

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        main = self._precision.main_weights(original, model_weights)
        return original.clone() if self._across and main is model_weights else main

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def rounds(self, pieces: Sequence[Piece], state: State) -> Iterator[int]:
        yield from range(len(pieces))

    def publish(self, main: Tensor, model_weights: Tensor) -> None:
        if self._across:
            model_weights.copy_(main)  # the host waits: the next gather reads host memory
        else:
            self._precision.publish(main, model_weights)

    def close(self) -> None:
        return


class HostHome:
    """In host memory: pinned where a GPU reads it."""

    place = Place.HOST
    piece_numel: int | None = None

    def __init__(self, precision: Precision, link: Link, rest: Place) -> None:
        self._precision = precision
        self._link = link
        self._across = link.apart and rest is Place.DEVICE  # model weights are in other memory
        self._published: set[int] = set()  # by the main weights' identity
        self.fetches = link if link.apart else None

    @property
    def staging_bytes(self) -> int:
        return 0

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        main = self._precision.main_weights(original, model_weights)
        if not self._link.apart or (main is model_weights and not self._across):
            return main
        return self._link.host(main.numel(), main.dtype).copy_(main)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def rounds(self, pieces: Sequence[Piece], state: State) -> Iterator[int]:
        for number, piece in enumerate(pieces):
            yield number
            self._follow(piece, piece.weights)

    def publish(self, main: Tensor, model_weights: Tensor) -> None:
        if id(main) in self._published:
            self._published.remove(id(main))
        else:
            self._bring(main, model_weights)
        self._link.join()

    def close(self) -> None:
        return

    def _follow(self, piece: Piece, weights: Sequence[Tensor]) -> None:
        """A piece was updated: its model weights set out."""
        for weight, target in zip(weights, piece.targets, strict=True):
            self._bring(weight.detach(), target)
        self._published.add(id(piece.main))

    def _bring(self, main: Tensor, model_weights: Tensor) -> None:
        if main.data_ptr() == model_weights.data_ptr():
            return
        if self._across:
            self._link.send(main, model_weights)
        else:
            self._precision.publish(main, model_weights)

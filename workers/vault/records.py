"""SlotRef, SlotInfo, errors.

What is said about a vault's contents: frozen, small, and free of torch.

What there is of for each rank is a named tuple: a large job makes and packs thousands of them
in every repair, and a dataclass costs three times as much.

What can go wrong with a vault. All of them cross the socket as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rayzero.engine.checkpoint.format import WrittenFile
from rayzero.engine.errors import DataError, RayzeroError
from rayzero.workers.chaos.spec import FaultFired


class SlotRef(NamedTuple):
    """One rank's state of one step, in a vault.

    Args:
        generation, rank: who wrote it.
        node_id: of the vault that holds it.
    """

    generation: int
    rank: int
    step: int
    node_id: str


@dataclass(frozen=True)
class Restore:
    """What a generation begins from. Without slots, a checkpoint folder; a URL or a path.

    Args:
        slots: together they hold the whole state of `step`.
        checkpoint: `.../step-<n>`; empty when `slots` are given.
    """

    step: int
    slots: tuple[SlotRef, ...] = ()
    checkpoint: str = ""


class SlotInfo(NamedTuple):
    """A slot's buffer that holds a whole version, as its vault lists it."""

    generation: int
    rank: int
    world_size: int
    step: int
    nbytes: int
    pinned: bool
    replica: bool = False
    """Whether it was copied from another node's vault."""


@dataclass(frozen=True)
class ConnectionLost:
    """A worker's connection to its node's vault closed: its process is gone."""

    worker: int
    pid: int


VaultEvent: TypeAlias = ConnectionLost | FaultFired


RankFile: TypeAlias = WrittenFile
"""A file of a checkpoint, as the vault that wrote it reports it."""


class VaultGoneError(RayzeroError):
    """A vault does not answer: it died, or it is stuck. Training can go on without it."""


class VaultMemoryError(RayzeroError):
    """The node has too little memory for the slots that were asked for."""

    def __init__(self, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(
            f"a vault needs {_format_mib(needed_bytes)} more shared memory on this node, "
            f"{_format_mib(available_bytes)} are available",
            fix="recovery.replicas: 0 and no checkpoint.every_steps need no slots; otherwise more "
            "workers (smaller shards), or a higher memory limit of the container",
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes

    def __reduce__(self) -> tuple[type, tuple[int, int]]:
        return type(self), (self.needed_bytes, self.available_bytes)


class SlotRoomError(RayzeroError):
    """The JSON part of a rank's state is larger than the room that was reserved for it."""


class SlotGoneError(DataError):
    """A version is not in the vault: it was dropped, overwritten, or never finished."""


class SlotDamagedError(DataError):
    """A version's bytes are not those that were written."""


def _format_mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"

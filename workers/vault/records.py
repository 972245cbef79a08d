"""What is said about a vault's contents: frozen, small, and free of torch.

What there is of for each rank is a named tuple: a large job makes and packs thousands of them
in every repair, and a dataclass costs three times as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rayzero.engine.checkpoint.format import WrittenFile


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


@dataclass(frozen=True)
class FaultFired:
    """An injected fault happened just now; sent before it takes effect."""

    rank: int
    step: int
    fault: str


VaultNews: TypeAlias = ConnectionLost | FaultFired


RankFile: TypeAlias = WrittenFile
"""A file of a checkpoint, as the vault that wrote it reports it."""

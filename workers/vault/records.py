"""Values and errors of vaults that pass between processes. Free of torch.

Values of which there is one per rank are named tuples: a large job creates and pickles thousands of
them in every recovery, and a dataclass costs three times as much.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Self, TypeAlias

from rayzero.engine.errors import DataError, RayzeroError
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.vault.process_end import ProcessEnd


class SlotRef(NamedTuple):
    """A reference to one rank's state of one step in a vault.

    Args:
        generation, rank: of the slot's writer.
        node_id: the node of the vault that holds it.
    """

    generation: int
    rank: int
    step: int
    node_id: str

    def describe(self) -> str:
        """Returns the text for error messages."""
        return "the slot of generation {}, rank {}, step {} on node {}".format(*self)


@dataclass(frozen=True)
class Restore:
    """The state a generation starts from: vault slots, or a checkpoint.

    Args:
        slots: together they hold the complete state of `step`.
        checkpoint: path or URL of `.../step-<n>`; empty if `slots` are given.
    """

    step: int
    slots: tuple[SlotRef, ...] = ()
    checkpoint: str = ""


class SlotInfo(NamedTuple):
    """A complete version in a vault, as the vault lists it."""

    generation: int
    rank: int
    world_size: int
    step: int
    nbytes: int
    pinned: bool
    """Whether a checkpoint needs the version."""
    replica: bool = False
    """Whether the version was copied from another node's vault."""


@dataclass(frozen=True)
class ConnectionLost:
    """A worker's process died, or closed its connection to its node's vault.

    The event is sent when a thread of the process exits. A second one, with `has_ended`, follows
    when the whole process has ended.

    Args:
        end: how the process died, as far as that is known at once.
    """

    worker: int
    pid: int
    end: ProcessEnd = field(default_factory=ProcessEnd, compare=False)
    has_ended: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class ProcessStalled:
    """A worker's process has been stopped (`state` T or t) for some seconds, or has slept (S) or
    waited for a device (D) without using the CPU. A process that waits for other ranks is reported,
    too. An empty `state` means that the process runs again."""

    worker: int
    pid: int
    state: str


@dataclass(frozen=True)
class NotReplicated:
    """An attempt to copy a rank's slot of a step to another node has failed."""

    step: int
    problem: str


VaultEvent: TypeAlias = ConnectionLost | FaultFired | NotReplicated | ProcessStalled


class VaultGoneError(RayzeroError):
    """A vault does not answer, because it died or hangs. Training can continue without it."""


class VaultMemoryError(RayzeroError):
    """The node has too little memory for the requested slots."""


class SlotRoomError(RayzeroError):
    """The JSON metadata of a rank's state exceeds the space reserved for it."""


class SlotGoneError(DataError):
    """The vault does not hold the version: it was dropped, overwritten, or never finished."""

    @classmethod
    def of(cls, ref: SlotRef) -> Self:
        return cls(f"{ref.describe()} is gone: dropped, overwritten, or never finished")


class SlotDamagedError(DataError):
    """The version's bytes do not match their checksum, or its format is unknown."""

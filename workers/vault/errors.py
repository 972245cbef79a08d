"""What can go wrong with a vault. All of them cross the socket as they are."""

from __future__ import annotations

from rayzero.engine.errors import DataError, RayzeroError


class VaultGoneError(RayzeroError):
    """A vault does not answer: it died, or it is stuck. Training can go on without it."""


class VaultMemoryError(RayzeroError):
    """The node has too little memory for the slots that were asked for."""

    def __init__(self, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(
            f"a vault needs {_mib(needed_bytes)} more shared memory on this node, "
            f"{_mib(available_bytes)} are available",
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


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"

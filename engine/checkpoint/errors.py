"""What can be wrong with a checkpoint, and with where it lies."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from rayzero.engine.errors import ConfigError, DataError, RayzeroError

StoreTrouble: TypeAlias = Literal["full", "gone", "forbidden", "slow", "other"]

_FIXES: dict[StoreTrouble, str] = {
    "full": "free space there, checkpoint.keep, or checkpoint.path",
    "gone": "checkpoint.path: a folder, disk or bucket that is there",
    "forbidden": "the rights of the folder or the credentials of the store, or checkpoint.path",
    "slow": "the network to the store, or checkpoint.path",
    "other": "checkpoint.path",
}


class StoreError(RayzeroError):
    """A store did not do what it was asked for.

    Attributes:
        kind: full; gone: the place is not there; forbidden: not for us; slow: no answer in time.
        url: the place in question.
    """

    def __init__(self, kind: StoreTrouble, url: str, seen: str) -> None:
        super().__init__(f"{url}: {seen}", fix=_FIXES[kind])
        self.kind = kind
        self.url = url
        self._seen = seen

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.url, self._seen)


class CheckpointDamagedError(DataError):
    """A checkpoint is not what was written: bytes differ, or files are cut or missing."""


class CheckpointVersionError(ConfigError):
    """A checkpoint of a format that this version does not know."""

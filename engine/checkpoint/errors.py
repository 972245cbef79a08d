"""StoreError, damaged, mismatch, version.

What can be wrong with a checkpoint, and with where it lies.

Does a saved state fit a model?
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

from rayzero.engine.errors import ConfigError, DataError, RayzeroError
from rayzero.engine.layout.state_index import LogicalTensor

StoreErrorKind: TypeAlias = Literal["full", "gone", "forbidden", "slow", "other"]

_FIX_BY_KIND: dict[StoreErrorKind, str] = {
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

    def __init__(self, kind: StoreErrorKind, url: str, seen: str) -> None:
        super().__init__(f"{url}: {seen}", fix=_FIX_BY_KIND[kind])
        self.kind = kind
        self.url = url
        self._seen = seen

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.url, self._seen)


class CheckpointDamagedError(DataError):
    """A checkpoint is not what was written: bytes differ, or files are cut or missing."""


class CheckpointVersionError(ConfigError):
    """A checkpoint of a format that this version does not know."""


_MAX_LISTED = 3


class CheckpointMismatchError(ConfigError):
    """A state of another model: names or shapes differ."""


def check_state_fits_model(
    wanted: Mapping[str, LogicalTensor], held: Mapping[str, LogicalTensor]
) -> None:
    """Compares names and shapes; dtypes may differ.

    Args:
        wanted: the model's tensors.
        held: the state's.

    Raises:
        CheckpointMismatchError: which are missing, which are too many, and whose shape differs.
    """
    missing = [name for name in wanted if name not in held]
    foreign = [name for name in held if name not in wanted]
    shapes = [
        f"{name} is {list(held[name].shape)} in the state and {list(one.shape)} in the model"
        for name, one in wanted.items()
        if name in held and held[name].shape != one.shape
    ]
    told = [
        f"{len(found)} {what}: {_list_some(found)}"
        for what, found in (
            ("tensors of the model are not in it", missing),
            ("of its tensors are not in the model", foreign),
            ("tensors have another shape", shapes),
        )
        if found
    ]
    if told:
        raise CheckpointMismatchError(
            "the saved state is another model's: " + "; ".join(told),
            allowed="a state with the model's parameters and buffers, by name and shape",
            fix="the model, or which checkpoint is resumed from (checkpoint.resume)",
        )


def _list_some(found: Iterable[str]) -> str:
    found = list(found)
    return ", ".join(found[:_MAX_LISTED]) + (", ..." if len(found) > _MAX_LISTED else "")

"""Errors of stores and checkpoints; check that a saved state fits a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from rayzero.engine.errors import ConfigError, DataError, RayzeroError
from rayzero.engine.layout.state_index import LogicalTensor

StoreErrorKind: TypeAlias = Literal["full", "gone", "forbidden", "slow", "other"]

_FIX_BY_KIND: dict[StoreErrorKind, str] = {
    "full": "free space in the store, checkpoint.keep, or checkpoint.path",
    "gone": "checkpoint.path: an existing folder, disk or bucket",
    "forbidden": "the permissions of the folder, the store's credentials, or checkpoint.path",
    "slow": "the network to the store, or checkpoint.path",
    "other": "checkpoint.path",
}


class StoreError(RayzeroError):
    """An operation of a store failed.

    Attributes:
        kind: full; gone: does not exist; forbidden: access denied; slow: timeout.
        url: the path or URL.
    """

    def __init__(self, kind: StoreErrorKind, url: str, seen: str) -> None:
        super().__init__(f"{url}: {seen}", fix=_FIX_BY_KIND[kind])
        self.kind = kind
        self.url = url
        self._seen = seen

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.url, self._seen)


class CheckpointDamagedError(DataError):
    """A checkpoint is damaged: bytes differ, or files are truncated or missing."""


class CheckpointVersionError(ConfigError):
    """A checkpoint of an unsupported format version."""


_MAX_LISTED = 3


class CheckpointMismatchError(ConfigError):
    """A state is of another model: names or shapes differ."""


def check_state_fits_model(
    wanted: Mapping[str, LogicalTensor], held: Mapping[str, LogicalTensor]
) -> None:
    """Compare names and shapes; dtypes may differ.

    Args:
        wanted: the model's tensors.
        held: the state's tensors.

    Raises:
        CheckpointMismatchError: lists missing and unexpected tensors, and differing shapes.
    """
    missing = [name for name in wanted if name not in held]
    unexpected = [name for name in held if name not in wanted]
    shapes = [
        f"{name} is {list(held[name].shape)} in the state and {list(tensor.shape)} in the model"
        for name, tensor in wanted.items()
        if name in held and held[name].shape != tensor.shape
    ]
    differences = [
        f"{len(names)} {text}: {_list_some(names)}"
        for text, names in (
            ("tensors of the model are not in it", missing),
            ("of its tensors are not in the model", unexpected),
            ("tensors have another shape", shapes),
        )
        if names
    ]
    if differences:
        raise CheckpointMismatchError(
            "the saved state is of another model: " + "; ".join(differences),
            allowed="a state with the model's parameters and buffers, by name and shape",
            fix="the model, or the checkpoint to resume from (checkpoint.resume)",
        )


def _list_some(names: list[str]) -> str:
    return ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")

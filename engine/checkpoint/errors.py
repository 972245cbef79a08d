"""Errors of stores and checkpoints, and the check that a saved state fits a model."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from rayzero.engine.errors import ConfigError, DataError, RayzeroError, first_line
from rayzero.engine.layout.state_index import LogicalTensor

StoreErrorKind: TypeAlias = Literal["full", "gone", "forbidden", "slow", "unreadable", "other"]

_FIX_BY_KIND: dict[StoreErrorKind, str] = {
    "full": "free space in the store, or change checkpoint.keep or checkpoint.path",
    "gone": "set checkpoint.path to an existing folder, disk or bucket",
    "forbidden": "check the permissions of the folder, the store's credentials, or checkpoint.path",
    "slow": "check the network to the store, or checkpoint.path",
    "unreadable": "remove or replace it",
    "other": "check checkpoint.path",
}


class StoreError(RayzeroError):
    """An operation of a store failed.

    Attributes:
        kind: the reason. full: no space or quota; gone: the file or folder does not exist;
            forbidden: access denied; slow: timeout; unreadable: not a regular file, or too large.
        url: the path or URL.
        damage: what is wrong with the file, without the URL; empty if the store itself failed.
    """

    def __init__(self, kind: StoreErrorKind, url: str, seen: str) -> None:
        super().__init__(f"{url}: {seen}", fix=_FIX_BY_KIND[kind])
        self.kind = kind
        self.url = url
        self.damage = {"gone": "is missing", "unreadable": seen}.get(kind, "")
        self._seen = seen

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.url, self._seen)


_ERRNOS: Mapping[StoreErrorKind, set[int]] = {
    "full": {errno.ENOSPC, errno.EDQUOT, errno.EFBIG},
    "gone": {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENODEV},
    "forbidden": {errno.EACCES, errno.EPERM, errno.EROFS},
    "slow": {errno.ETIMEDOUT},
}

# Parts of messages of pyarrow and the services, in lower case; the first match decides.
_MESSAGES: Mapping[StoreErrorKind, tuple[str, ...]] = {
    "forbidden": (
        "access_denied",
        "access denied",
        "invalid_access_key",
        "signature_does_not_match",
        "invalid_signature",
        "invalid_client_token",
        "unrecognized_client",
        "expired",
        "permission",
    ),
    "gone": ("no_such_bucket", "bucket does not exist", "resource_not_found", "not found"),
    "full": ("quota", "space"),
    "slow": (
        "slow_down",
        "throttling",
        "timeout",
        "timed out",
        "network_connection",
        "service_unavailable",
    ),
}


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Converts OSError to StoreError."""
    try:
        yield
    except OSError as error:
        text = error.strerror or first_line(error)
        raise StoreError(_error_kind(error.errno, text.lower()), url, text) from error


def _error_kind(number: int | None, text: str) -> StoreErrorKind:
    kinds = [kind for kind, numbers in _ERRNOS.items() if number in numbers]
    kinds += [kind for kind, parts in _MESSAGES.items() if any(part in text for part in parts)]
    return kinds[0] if kinds else "other"


class CheckpointDamagedError(DataError):
    """A checkpoint is damaged: bytes differ, or files are truncated or missing."""


class CheckpointVersionError(ConfigError):
    """A checkpoint of an unsupported format version."""


_MAX_LISTED = 3


class CheckpointMismatchError(ConfigError):
    """A saved state does not fit the model: names or shapes of tensors differ."""


def check_state_fits_model(
    model: Mapping[str, LogicalTensor], state: Mapping[str, LogicalTensor]
) -> None:
    """Compares names and shapes of the tensors of a model and of a state. Dtypes may differ. Raises
    CheckpointMismatchError, which lists missing and unexpected tensors, and differing shapes."""
    differences = {
        "tensors of the model are not in it": [name for name in model if name not in state],
        "of its tensors are not in the model": [name for name in state if name not in model],
        "tensors have another shape": [
            f"{name} is {list(saved.shape)} in the state and {list(tensor.shape)} in the model"
            for name, tensor in model.items()
            if (saved := state.get(name)) is not None and saved.shape != tensor.shape
        ],
    }
    texts = [
        f"{len(names)} {text}: {', '.join(names[:_MAX_LISTED])}"
        + (", ..." if len(names) > _MAX_LISTED else "")
        for text, names in differences.items()
        if names
    ]
    if texts:
        raise CheckpointMismatchError(
            "the saved state is of another model: " + "; ".join(texts),
            allowed="a state with the model's parameters and buffers, by name and shape",
            fix="change the model, or the checkpoint to resume from (checkpoint.resume)",
        )

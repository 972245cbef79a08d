"""From a path or a URL to the store that it is in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from rayzero.engine.checkpoint.store_local import LocalStore
from rayzero.engine.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from rayzero.engine.checkpoint.store import Store

_REMOTE_SCHEMES = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")


def open_store(url: str) -> Store:
    """The store whose top folder is a path, or a file://, s3://, gs:// or hdfs:// URL. Nothing has
    to be there yet.

    Raises:
        ConfigError: no such kind of URL, or an option in it is wrong.
        StoreError: the service cannot be reached.
    """
    if "://" not in url:
        return LocalStore(Path(url))
    scheme = urlsplit(url).scheme
    if scheme == "file":
        return LocalStore(Path(unquote(urlsplit(url).path)))
    if scheme not in _REMOTE_SCHEMES:
        raise ConfigError(
            f"checkpoints cannot lie at {url}{did_you_mean(scheme, [*_REMOTE_SCHEMES, 'file'])}",
            allowed="a path, or a URL with file, " + ", ".join(_REMOTE_SCHEMES),
            fix="checkpoint.path",
        )
    # Here, because pyarrow takes longer to import than a vault to start, and a disk needs none.
    from rayzero.engine.checkpoint.store_remote import RemoteStore

    return RemoteStore(url)

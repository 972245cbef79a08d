"""From a path or a URL to the store that it is in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from rayzero.engine.checkpoint.store_local import LocalStore
from rayzero.engine.errors import ConfigError, nearest

if TYPE_CHECKING:
    from rayzero.engine.checkpoint.storage import Store

_REMOTE = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")


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
    if scheme not in _REMOTE:
        raise ConfigError(
            f"checkpoints cannot lie at {url}{nearest(scheme, [*_REMOTE, 'file'])}",
            allowed="a path, or a URL with file, " + ", ".join(_REMOTE),
            fix="checkpoint.path",
        )
    # Here, because pyarrow takes longer to import than a vault to start, and a disk needs none.
    from rayzero.engine.checkpoint.store_remote import RemoteStore

    return RemoteStore(url)


def is_remote(url: str) -> bool:
    """Whether a path or URL is in another place than this machine's file systems."""
    return "://" in url and urlsplit(url).scheme != "file"


def join(url: str, *names: str) -> str:
    """The path or URL of something in a folder; a URL's options stay at its end."""
    base, mark, query = _cut(url)
    return "/".join([base.rstrip("/"), *names]) + mark + query


def split(url: str) -> tuple[str, str]:
    """The folder that something is in, and its name there."""
    base, mark, query = _cut(url)
    parent, slash, name = base.rstrip("/").rpartition("/")
    return (parent or slash or ".") + mark + query, name


def _cut(url: str) -> tuple[str, str, str]:
    """What is in front of a URL's options, the question mark, and the options."""
    return url.partition("?") if "://" in url else (url, "", "")

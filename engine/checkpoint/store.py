"""Opens the store of a path or URL; functions on such paths and URLs."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from rayzero.engine.checkpoint.store_local import LocalStore, Store
from rayzero.engine.errors import ConfigError, did_you_mean

_REMOTE_SCHEMES = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")


def open_store(url: str, setting: str = "checkpoint.path", *, retries: bool = True) -> Store:
    """Returns the store whose top folder is `url`: a path, or a file://, s3://, gs:// or hdfs://
    URL. The folder need not exist yet. Without `retries` S3's client does not retry requests; the
    caller does. Raises ConfigError, which names `setting`, if the URL's scheme is not supported or
    an option in the URL is wrong; StoreError if the service cannot be reached."""
    if not is_remote(url):
        return LocalStore(Path(local_path(url)))
    scheme = urlsplit(url).scheme
    if scheme not in _REMOTE_SCHEMES:
        raise ConfigError(
            f"the URL {url} cannot be used{did_you_mean(scheme, [*_REMOTE_SCHEMES, 'file'])}",
            allowed="a path, or a URL with file, " + ", ".join(_REMOTE_SCHEMES),
            fix=setting,
        )
    # Imported here: pyarrow takes longer to import than a vault to start, and disks do not need it.
    from rayzero.engine.checkpoint.store_remote import RemoteStore

    return RemoteStore(url, setting, retries=retries)


def is_remote(url: str) -> bool:
    """Returns whether a path or URL is outside this machine's file systems."""
    return "://" in url and urlsplit(url).scheme != "file"


def folder_exists(url: str) -> bool:
    """Returns whether a folder exists. True for all remote URLs: object stores have no folders."""
    return is_remote(url) or Path(local_path(url)).is_dir()


def local_path(url: str) -> str:
    """Returns the path of a folder that is given by path or file:// URL."""
    return unquote(urlsplit(url).path) if "://" in url else url


def join_url(url: str, *names: str) -> str:
    """Joins names to a path or URL. A URL's query stays at the end."""
    base, mark, query = _split_options(url)
    return "/".join([base.rstrip("/"), *names]) + mark + query


def split_url(url: str) -> tuple[str, str]:
    """Returns the parent folder and the name of a path or URL."""
    base, mark, query = _split_options(url)
    parent, slash, name = base.rstrip("/").rpartition("/")
    return (parent or slash or ".") + mark + query, name


def _split_options(url: str) -> tuple[str, str, str]:
    """Returns a URL without its query, the question mark, and the query."""
    return url.partition("?") if "://" in url else (url, "", "")

"""Snapshot sources of `rayzero top`: a job's HTTP endpoint, and the check of what it returns."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.client import HTTPException
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from rayzero.engine.errors import ConfigError, EngineError

Snapshot = dict[str, Any]
SnapshotSource = Callable[[], Snapshot]

SUPPORTED_FORMAT = 2
"""Of /snapshot.json."""
_HTTP_TIMEOUT_S = 5.0
_MAX_RESPONSE_BYTES = 64 << 20


class SnapshotUnavailableError(EngineError):
    """The job's endpoint does not respond."""


def is_url(target: str) -> bool:
    return "://" in target


def endpoint_source(url: str) -> SnapshotSource:
    """Snapshots from the endpoint of a job, given the URL of its page or of a path below it.

    Raises:
        ConfigError: it is not an HTTP URL.
    """
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"{url!r} is not the URL of a job's page",
            allowed="http://HOST:PORT, or a job's name",
            fix="use the URL that the job printed at its start (metrics.port in the job file)",
        )
    folder = parts.path.rsplit("/", 1)[0]
    address = parts._replace(path=f"{folder}/snapshot.json", query="", fragment="").geturl()

    def fetch() -> Snapshot:
        try:
            with urlopen(address, timeout=_HTTP_TIMEOUT_S) as response:
                return check_snapshot(json.loads(response.read(_MAX_RESPONSE_BYTES)), address)
        except (URLError, HTTPException, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise SnapshotUnavailableError(
                f"no response from {address}: {reason}",
                fix="check that the job is running, and that its job file sets metrics.port",
            ) from None
        except ValueError:
            raise _not_a_snapshot(address) from None

    return fetch


def check_snapshot(value: Any, where: str) -> Snapshot:
    """Returns the snapshot.

    Raises:
        ConfigError: the value is not a snapshot, or has another format.
    """
    if not isinstance(value, dict) or "format" not in value:
        raise _not_a_snapshot(where)
    if value["format"] != SUPPORTED_FORMAT:
        raise ConfigError(
            f"the snapshot of {where} has format {value['format']!r}",
            allowed=f"format {SUPPORTED_FORMAT}",
            fix="use the same version of rayzero here as in the job",
        )
    return value


def _not_a_snapshot(where: str) -> ConfigError:
    return ConfigError(
        f"{where} did not return a job's snapshot",
        allowed="the endpoint that a rayzero job serves on its metrics.port",
        fix="use the URL that the job printed at its start",
    )

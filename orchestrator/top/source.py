"""Where `rayzero top` gets its snapshots from."""

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
"""The snapshots that can be read."""
_HTTP_TIMEOUT_S = 5.0
_MAX_RESPONSE_BYTES = 64 << 20


class SnapshotUnavailableError(EngineError):
    """Nothing answers now."""


def is_url(target: str) -> bool:
    return "://" in target


def endpoint_source(url: str) -> SnapshotSource:
    """The snapshots of the job whose endpoint that is: the address of its page, or what is below.

    Raises:
        ConfigError: no such address can be.
    """
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        named = False
    if not named:
        raise ConfigError(
            f"{url!r} is no address of a job's page",
            allowed="http://HOST:PORT, or a job's name",
            fix="the address that the job told when it began (metrics.port)",
        )
    folder = parts.path.rsplit("/", 1)[0]
    address = parts._replace(path=f"{folder}/snapshot.json", query="", fragment="").geturl()

    def fetch() -> Snapshot:
        try:
            with urlopen(address, timeout=_HTTP_TIMEOUT_S) as answer:
                return check_snapshot(json.loads(answer.read(_MAX_RESPONSE_BYTES)), address)
        except (URLError, HTTPException, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise SnapshotUnavailableError(
                f"nothing answers at {address}: {reason}",
                fix="is the job running, and metrics.port set in its job file?",
            ) from None
        except ValueError:
            raise _not_a_snapshot(address) from None

    return fetch


def check_snapshot(value: Any, where: str) -> Snapshot:
    """The snapshot, if it is one that can be read.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, dict) or "format" not in value:
        raise _not_a_snapshot(where)
    if value["format"] != SUPPORTED_FORMAT:
        raise ConfigError(
            f"{where} tells its job in format {value['format']!r}",
            allowed=f"format {SUPPORTED_FORMAT}",
            fix="the same version of rayzero here as in the job",
        )
    return value


def _not_a_snapshot(where: str) -> ConfigError:
    return ConfigError(
        f"{where} is no job's snapshot",
        allowed="what a job of rayzero serves at its metrics.port",
        fix="the address that the job told when it began",
    )

"""Follows a job: reads its snapshots from a source, and displays them.

A source is the job's HTTP endpoint, its process, or the output of `rayzero top --json` in the
job's cluster.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any, TextIO
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from rayzero.engine.errors import ConfigError, EngineError
from rayzero.orchestrator.top.board import Snapshot, has_ended, render_board, snapshot_line
from rayzero.orchestrator.top.format import format_duration, printable_text

SnapshotSource = Callable[[], Snapshot]

SUPPORTED_FORMAT = 2
"""The format of /snapshot.json that this module can show."""
SNAPSHOT_FILE = "snapshot.json"
"""Name of the file with the snapshot in a job's folder."""
_HTTP_TIMEOUT_S = 5.0
_MAX_RESPONSE_BYTES = 64 << 20

REFRESH_S = 1.0
LINE_INTERVAL_S = 5.0
LOST_CONTACT_S = 60.0
"""Without a live board, `follow_job` fails after this time without a response."""

ShowSnapshot = Callable[[Snapshot, str | None], None]
"""Shows a snapshot, and, if it is out of date, a text that says why."""


def follow_job(
    source: SnapshotSource,
    as_json: bool,
    once: bool,
    out: TextIO | None = None,
    clock: Callable[[], float] = monotonic,
    wait: Callable[[float], None] = sleep,
    first: RenderableType = "",
) -> None:
    """Shows the job's current snapshot; unless `once`, until the job ends, or until Ctrl-C. A live
    board shows `first` until the first response. Raises SnapshotUnavailableError if the first
    request fails; without a live board, also after a minute without a response."""
    out = out or sys.stdout
    is_live = out.isatty() and not as_json
    with open_display(as_json, once, out, first) as show:
        now, updated_s = source(), clock()
        show(now, None)
        while not (once or has_ended(now)):
            wait(REFRESH_S if is_live else LINE_INTERVAL_S)
            try:
                now, updated_s = source(), clock()
                show(now, None)
            except SnapshotUnavailableError as error:
                silent_s = clock() - updated_s
                if is_live:
                    show(now, f"no response for {silent_s:.0f} s: {error}")
                elif silent_s > LOST_CONTACT_S:
                    raise


@contextmanager
def open_display(
    as_json: bool, once: bool, out: TextIO | None = None, first: RenderableType = ""
) -> Iterator[ShowSnapshot]:
    """Yields a function that shows a snapshot: as JSON, on a board, or as a text line. A live board
    begins with `first`, which is erased at the end if there was no snapshot."""
    out = out or sys.stdout
    if as_json or not out.isatty():
        to_line = json.dumps if as_json else snapshot_line
        yield lambda now, _: print(to_line(now), file=out, flush=True)
    elif once:
        yield lambda now, _: Console(file=out).print(render_board(now))
    else:
        terminal = Console(file=out)
        with Live(first, console=terminal, auto_refresh=False, vertical_overflow="crop") as live:
            live.transient = True

            def update(now: Snapshot, error: str | None) -> None:
                live.transient = False
                live.update(render_board(now, error), refresh=True)

            yield update


def connecting_board(name: str, where: str, folder: Path) -> RenderableType:
    """Returns the board of a job before its first response. It has the last snapshot in the job's
    folder, if the folder is on this machine."""
    text = Text.assemble((printable_text(name), "bold"), f"  connecting to {printable_text(where)}")
    path = folder / SNAPSHOT_FILE
    with suppress(OSError, ConfigError, ValueError, LookupError, TypeError, AttributeError):
        if path.is_file():
            last = check_snapshot(json.loads(path.read_bytes()), str(path))
            board = render_board(last)
            age = format_duration(time() - last["at_s"])
            return Group(text.append(f"; its state {age} ago:"), board)
    return text


def parse_snapshot(line: str, where: str) -> Snapshot | None:
    """Returns the snapshot in a line of output; None for other lines, such as errors and Ray's log
    lines. Raises ConfigError for a snapshot of an unsupported format."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    is_snapshot = isinstance(value, dict) and "format" in value
    return check_snapshot(value, where) if is_snapshot else None


class SnapshotUnavailableError(EngineError):
    """The job's endpoint does not respond."""


def endpoint_source(url: str) -> SnapshotSource:
    """Returns a source of snapshots from a job's endpoint. `url` is the URL of its page, or of a
    path below. Raises ConfigError if it is not an HTTP URL."""
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
    """Returns the value itself. Raises ConfigError if it is not a snapshot, has another format, or
    has values that cannot be shown."""
    if not isinstance(value, dict) or "format" not in value:
        raise _not_a_snapshot(where)
    if value["format"] != SUPPORTED_FORMAT:
        raise ConfigError(
            f"the snapshot of {where} has format {value['format']!r}",
            allowed=f"format {SUPPORTED_FORMAT}",
            fix="use the same version of rayzero here as in the job",
        )
    from rayzero.orchestrator.metrics.snapshot_model import validate_snapshot  # pydantic is slow

    validate_snapshot(value, f"the snapshot of {where}")
    return value


def _not_a_snapshot(where: str) -> ConfigError:
    return ConfigError(
        f"{where} did not return a job's snapshot",
        allowed="the endpoint that a rayzero job serves on its metrics.port",
        fix="use the URL that the job printed at its start",
    )

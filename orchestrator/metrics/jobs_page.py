"""The page of all jobs of a folder, running and ended: its HTTP server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from time import time
from typing import Any

from rayzero.engine.errors import RayzeroError, first_line
from rayzero.orchestrator.metrics.endpoint import (
    STOP_TIMEOUT_S,
    StartResponse,
    json_response,
    listen,
    refuse,
    respond,
)
from rayzero.orchestrator.metrics.run_files import HISTORY_FILE, SNAPSHOT_FILE, RunIndex
from rayzero.orchestrator.page import page_response

INDEX_FORMAT = 1
"""Of /jobs.json: incremented when readers of the previous format could misread it."""
_RUN_FILE = re.compile(
    rf"/jobs/([A-Za-z0-9][A-Za-z0-9._-]{{0,62}})/({re.escape(SNAPSHOT_FILE)}|{re.escape(HISTORY_FILE)})"
)
"""A job's name cannot leave the folder."""


class JobsPage:
    """Serves the page in a thread of its own until `close`, as `Endpoint` does. Raises ConfigError
    if it cannot listen there; port 0 is any free one."""

    def __init__(self, folder: Path, host: str, port: int, now: Callable[[], float] = time) -> None:
        self._folder = folder
        self._index = RunIndex(folder)
        self._now = now
        self._server = listen(host, range(port, port + 1), "--port", "--port and --host")
        self.url = (
            f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}/"
        )
        self._server.set_app(self._handle_request)
        self._server.start()

    def close(self) -> None:
        self._server.stop(STOP_TIMEOUT_S)

    def _handle_request(self, environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] != "GET":
            return refuse(start, "405 Method Not Allowed", "use GET")
        if path == "/":
            return respond(environ, start, *page_response(all_jobs=True))
        if path == "/jobs.json":
            return respond(environ, start, *json_response(self._list_jobs()))
        named = _RUN_FILE.fullmatch(path)
        try:
            content = None if named is None else self._index.file(*named.groups())
        except RayzeroError as error:
            return refuse(start, "422 Unprocessable Content", first_line(error))
        if content is None:
            known = "/, /jobs.json, /jobs/NAME/snapshot.json, /jobs/NAME/history.json"
            return refuse(start, "404 Not Found", f"available: {known}")
        return respond(environ, start, "application/json; charset=utf-8", content)

    def _list_jobs(self) -> dict[str, Any]:
        return {
            "format": INDEX_FORMAT,
            "at_s": self._now(),
            "folder": str(self._folder),
            "jobs": self._index.rows(),
        }

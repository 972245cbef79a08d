"""The page of all jobs of a folder, running and ended: its HTTP server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import time
from typing import Any

from aiohttp import web

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.job_file import flatten_document
from rayzero.orchestrator.metrics.endpoint import (
    STOP_TIMEOUT_S,
    Page,
    jobs_csv,
    json_response,
    listen,
    page_answer,
    steps_csv,
)
from rayzero.orchestrator.metrics.run_files import HISTORY_FILE, SNAPSHOT_FILE, Row, RunIndex
from rayzero.orchestrator.page import page_response

INDEX_FORMAT = 1
"""Of /jobs.json: incremented when readers of the previous format could misread it."""
_RUN_FILE = re.compile(
    rf"/jobs/([A-Za-z0-9][A-Za-z0-9._-]{{0,62}})/"
    rf"({re.escape(SNAPSHOT_FILE)}|{re.escape(HISTORY_FILE)}|steps\.csv)"
)
"""A job's name cannot leave the folder."""


class JobsPage:
    """Serves the page until `close`, as `HttpServer` does. Raises ConfigError if it cannot listen
    there; port 0 is any free one."""

    def __init__(self, folder: Path, host: str, port: int, now: Callable[[], float] = time) -> None:
        self._folder = folder
        self._index = RunIndex(folder)
        self._now = now
        of_job = (f"/jobs/NAME/{name}" for name in (SNAPSHOT_FILE, HISTORY_FILE, "steps.csv"))
        answer = page_answer(self._find_page, ", ".join(["/", "/jobs.json", "/jobs.csv", *of_job]))
        self._server = listen(host, [port], answer, "--port", "--port and --host")
        self.url = f"{self._server.url}/"

    def close(self) -> None:
        self._server.stop(STOP_TIMEOUT_S)

    def _find_page(self, request: web.BaseRequest) -> Page | None:
        """Raises as `RunIndex.file`."""
        match request.path:
            case "/":
                return page_response(all_jobs=True)
            case "/jobs.json":
                return json_response(self._list_jobs())
            case "/jobs.csv":
                return jobs_csv(with_config_differences(self._index.rows()))
        if (named := _RUN_FILE.fullmatch(request.path)) is None:
            return None
        job, name = named.groups()
        is_csv = name == "steps.csv"
        content = self._index.file(job, HISTORY_FILE if is_csv else name)
        if content is None or not is_csv:
            return None if content is None else ("application/json; charset=utf-8", content)
        try:
            return steps_csv(json.loads(content))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ConfigError(f"the curves in {HISTORY_FILE} are damaged") from None

    def _list_jobs(self) -> dict[str, Any]:
        return {
            "format": INDEX_FORMAT,
            "at_s": self._now(),
            "folder": str(self._folder),
            "jobs": with_config_differences(self._index.rows()),
        }


def with_config_differences(rows: Sequence[Row]) -> list[Row]:
    """The rows, whose `config` is a job file, each with those of its values by dotted key that are
    not the same in all whose job file is known."""
    configs = [_leaves(row["config"]) for row in rows]
    known = [config for config in configs if config]
    keys = {key: None for config in known for key in config}
    differing = [
        key for key in keys if any(config.get(key) != known[0].get(key) for config in known)
    ]
    return [
        row | {"config": {key: config[key] for key in differing if key in config}}
        for row, config in zip(rows, configs, strict=True)
    ]


def _leaves(config: Mapping[str, Any]) -> dict[str, Any]:
    """Lists as JSON. A job's name is no setting."""
    return {
        key: json.dumps(value) if isinstance(value, list) else value
        for key, value in flatten_document(config)
        if key != "name"
    }

"""The page of all jobs in a folder or store, running and ended: its HTTP server, and the index that
reads the jobs' files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from threading import Lock
from time import monotonic, time
from typing import Any

from aiohttp import web

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.store import is_remote, open_store
from rayzero.engine.checkpoint.store_local import StoreEntry
from rayzero.engine.errors import ConfigError, RayzeroError, first_line
from rayzero.engine.redact import redact_url
from rayzero.orchestrator.facts import JobFacts
from rayzero.orchestrator.job_file import flatten_document
from rayzero.orchestrator.journal.entries import parse_facts
from rayzero.orchestrator.journal.files import STATE_FILE
from rayzero.orchestrator.metrics.endpoint import (
    STOP_TIMEOUT_S,
    Page,
    jobs_csv,
    json_response,
    listen,
    page_answer,
    steps_csv,
)
from rayzero.orchestrator.metrics.snapshot import SNAPSHOT_FORMAT, finite_json
from rayzero.orchestrator.metrics.snapshot_model import validate_snapshot
from rayzero.orchestrator.metrics.telemetry import HISTORY_FILE, SNAPSHOT_FILE
from rayzero.orchestrator.page import page_response

INDEX_FORMAT = 1
"""The format of /jobs.json: incremented when readers of the previous one could misread it."""
_RUN_FILE = re.compile(
    rf"/jobs/([A-Za-z0-9][A-Za-z0-9._-]{{0,62}})/"
    rf"({re.escape(SNAPSHOT_FILE)}|{re.escape(HISTORY_FILE)}|steps\.csv)"
)
"""Path of a file of a run. A job's name in it cannot lead out of the folder."""
MAX_FILE_BYTES = 32 * 2**20
"""Limit for the files that are read. A job writes no larger ones."""

LIST_INTERVAL_S = 5.0
"""A store's jobs are listed at most once in this time, however many clients ask."""
_READERS = 8  # threads that read jobs of a store

Row = dict[str, Any]


class JobsPage:
    """Serves the page with an `HttpServer`, from construction until `close`.

    Args:
        url: folder or store of the jobs, their `checkpoint.path`.
        port: the port; 0 for any free one.

    Raises:
        ConfigError: the server cannot listen on the port.
        StoreError: the store cannot be read.
    """

    def __init__(self, url: str, host: str, port: int, now: Callable[[], float] = time) -> None:
        self._url = url
        self._index = RunIndex(url)
        self._now = now
        if is_remote(url):
            self._index.rows()  # before the first client waits for it
        of_job = (f"/jobs/NAME/{name}" for name in (SNAPSHOT_FILE, HISTORY_FILE, "steps.csv"))
        available = ", ".join(["/", "/jobs.json", "/jobs.csv", *of_job])
        answer = page_answer(self._find_page, available, may_wait=True)
        self._server = listen(host, [port], answer, "--port", "--port and --host")
        self.url = f"{self._server.url}/"

    def close(self) -> None:
        self._server.stop(STOP_TIMEOUT_S)

    def _find_page(self, request: web.BaseRequest) -> Page | None:
        """Returns the page at the request's path, if any. Raises as `RunIndex.file`."""
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
            "folder": redact_url(self._url),
            "jobs": with_config_differences(self._index.rows()),
        }


def with_config_differences(rows: Sequence[Row]) -> list[Row]:
    """Replaces the `config` of each row, a job file, by its values that differ between the rows, by
    dotted key. Rows without a job file are not compared."""
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
    """Returns the values of a job file by dotted key, except the job's name. Lists become JSON."""
    return {
        key: json.dumps(value) if isinstance(value, list) else value
        for key, value in flatten_document(config)
        if key != "name"
    }


class RunIndex:
    """The runs in a folder or store of jobs (`checkpoint.path`). Files are read again when they
    change. Thread-safe: if two threads update the cache at once, one update may be lost, and the
    file is read once more."""

    def __init__(self, url: str) -> None:
        self._store = open_store(url, "--path")
        self._is_remote = is_remote(url)
        self._cache: dict[str, tuple[float, int, int, Any]] = {}
        self._lock = Lock()
        self._rows: list[Row] = []
        self._listed_s = -inf

    def rows(self) -> list[Row]:
        """Returns every run, the newest first. A store needs a request for each run, so its rows
        may be up to `LIST_INTERVAL_S` old. Raises StoreError if the store cannot be listed."""
        with self._lock:
            if not self._is_remote:
                return self._list(map)
            if monotonic() - self._listed_s >= LIST_INTERVAL_S:
                with ThreadPoolExecutor(_READERS) as pool:
                    self._rows = self._list(pool.map)
                self._listed_s = monotonic()
            return self._rows

    def file(self, job: str, name: str) -> bytes | None:
        """Returns the content of a run's file; None if there is none. `job` is a name, not a path.
        Raises StoreError if the file cannot be read; ConfigError if it is damaged."""
        path = f"{job}/{name}"
        parse = _parse_snapshot if name == SNAPSHOT_FILE else _check_history
        parsed = self._cached(path, self._store.find(path), parse)
        if isinstance(parsed, Damage):
            raise ConfigError(parsed.text)
        return self._read(path)

    def _list(self, map_all: Callable[..., Iterable[Row | None]]) -> list[Row]:
        try:
            entries = self._store.list_folder()
        except StoreError:
            if self._is_remote:
                raise
            entries = []
        names = sorted(entry.name for entry in entries if entry.is_folder)
        rows = [row for row in map_all(self._row, names) if row is not None]
        return sorted(rows, key=lambda row: -float(row["began_s"]))

    def _row(self, job: str) -> Row | None:
        """Returns the row of a run; None if the folder has none. A damaged file is an error in this
        row, and does not affect other rows."""
        snapshot: Any = None
        past: Any = None
        try:
            for entry in self._store.list_folder(job):
                if entry.name == SNAPSHOT_FILE:
                    snapshot = self._cached(f"{job}/{entry.name}", entry, _parse_snapshot)
                elif entry.name == STATE_FILE:
                    past = self._cached(f"{job}/{entry.name}", entry, _parse_journal)
        except StoreError as error:
            past = Damage(first_line(error), 0.0)
        damaged = next((parsed for parsed in (snapshot, past) if isinstance(parsed, Damage)), None)
        if isinstance(snapshot, dict):
            row = _row_of_snapshot(snapshot)
        elif isinstance(past, JobFacts):
            row = _row_of_journal(past)
        elif damaged is not None:
            row = {"state": "unreadable", "began_s": damaged.at_s, "at_s": damaged.at_s}
        else:
            return None
        if isinstance(past, JobFacts):
            row |= {
                "state": past.end_state or row["state"],
                "error": past.error.partition("\n")[0],
                "config": finite_json(past.spec, str),
            }
        row |= {"name": job} if damaged is None else {"name": job, "error": damaged.text}
        return {**_UNKNOWN_ROW, **row}

    def _cached(self, path: str, entry: StoreEntry | None, parse: Callable[[bytes], Any]) -> Any:
        """Returns the result of `parse` for a file's content, or `Damage` if it raises; None if
        there is no file. A file is read again only if it has changed. If its time has whole
        seconds, as in stores, it is read twice, because it may change again within the second."""
        if entry is None:
            return None
        key = (entry.modified_s, entry.nbytes)
        *old_key, reads_left, value = self._cache.get(path, (0.0, -1, 0, None))
        if tuple(old_key) != key:
            reads_left = 2 if entry.modified_s.is_integer() else 1
        if reads_left:
            try:
                content = self._read(path)
                value = None if content is None else parse(content)
            except RayzeroError as error:
                value = Damage(first_line(error), entry.modified_s)
            self._cache[path] = (*key, reads_left - 1, value)
        return value

    def _read(self, path: str) -> bytes | None:
        """Returns the content of a file; None if there is none. The store refuses anything but a
        regular file, because a FIFO, for example, would block."""
        try:
            return self._store.read(path, MAX_FILE_BYTES)
        except StoreError as error:
            if error.kind == "gone":
                return None
            raise


@dataclass(frozen=True)
class Damage:
    """Why a file cannot be used, and when it was written (Unix time)."""

    text: str
    at_s: float


_UNKNOWN_ROW: Mapping[str, Any] = {
    **dict.fromkeys(("world_size", "stage", "step", "steps", "step_s", "tokens_per_s")),
    **dict.fromkeys(("remaining_s", "loss", "goodput", "faults", "wall_s")),
    **dict.fromkeys(("samples_per_s", "cpu_cores", "gpu_utilization")),
    "has_curves": False,
    "config": {},
}


def _parse_json(content: bytes, name: str) -> Any:
    """Parses JSON as a browser does, without NaN and Infinity. Raises ConfigError."""

    def refuse(constant: str) -> None:
        raise ValueError(f"it has {constant}")

    try:
        return json.loads(content, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {first_line(error)}") from None


def _parse_snapshot(content: bytes) -> Row | None:
    """Returns a snapshot; None if it has another format. Raises ConfigError if it is damaged."""
    value = _parse_json(content, SNAPSHOT_FILE)
    if isinstance(value, dict) and value.get("format", SNAPSHOT_FORMAT) != SNAPSHOT_FORMAT:
        return None
    validate_snapshot(value, SNAPSHOT_FILE)
    return dict(value)


def _check_history(content: bytes) -> None:
    value = _parse_json(content, HISTORY_FILE)
    if not (isinstance(value, dict) and "curves" in value):
        raise ConfigError(f"{HISTORY_FILE} has no curves")


def _parse_journal(content: bytes) -> JobFacts:
    if (past := parse_facts(content)) is None:
        raise ConfigError(f"{STATE_FILE} is not the state of a run")
    return past


def _row_of_snapshot(value: Row) -> Row:
    progress, training = value["progress"], value["training"]
    usage = value.get("usage", {})  # a run of an earlier version has none
    return {
        **{key: value[key] for key in ("state", "began_s", "at_s", "world_size", "stage")},
        **{
            key: progress[key] for key in ("step", "steps", "step_s", "tokens_per_s", "remaining_s")
        },
        **{key: usage.get(key) for key in ("cpu_cores", "gpu_utilization")},
        "samples_per_s": progress.get("samples_per_s"),
        "loss": training["loss"],
        "goodput": value["goodput"]["ratio"],
        "faults": len(value["faults"]),
        "wall_s": value["goodput"]["wall_s"],
        "has_curves": True,
    }


def _row_of_journal(past: JobFacts) -> Row:
    """Returns the row of a run that has only a journal: an earlier version made it, or its other
    files are elsewhere."""
    productive_s = past.counters.seconds.get("productive", 0.0)
    wall_s = max(0.0, past.last_at_s - past.began_at_s)
    return {
        "state": past.state,
        "began_s": past.began_at_s,
        "at_s": past.last_at_s,
        "world_size": past.world_size,
        "step": past.step,
        "steps": past.steps,
        "goodput": productive_s / wall_s if wall_s else None,
        "faults": len(past.faults),
        "wall_s": wall_s,
    }

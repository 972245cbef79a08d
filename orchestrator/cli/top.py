"""`rayzero top`: a job as it stands, live in a terminal."""

from __future__ import annotations

from rayzero.orchestrator.cli.codes import with_exit_code
from rayzero.orchestrator.top.follow import follow, show_once
from rayzero.orchestrator.top.source import served_at


@with_exit_code
def watch_job(url: str, once: bool, as_json: bool) -> int:
    (show_once if once else follow)(served_at(url), as_json)
    return 0

"""One question to a running job, for the commands that ask one."""

from __future__ import annotations

from typing import Any

from rayzero.orchestrator.finding import find


def ask(name: str, address: str | None, method: str, *args: Any) -> Any:
    """The job's answer. Raises as `find` and `FoundJob.ask`."""
    found = find(name, address)
    try:
        return found.ask(method, *args)
    finally:
        found.cluster.close()

"""The health of a node, measured by a process on the node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from subprocess import Popen
from threading import Lock, Thread
from time import time
from typing import Any

from rayzero.workers.probe_process import run_probe

NODE_PROBE = "rayzero.workers.vault.node_probe"
SLOWER = 10
"""How many times as long computing and copying take on a node with the fault `slow_node`."""
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class HealthReport:
    """Everything that was measured on one node.

    Args:
        figures: the measured figures by check (`orchestrator/policies/health.py` has their units);
            a GPU's checks have names such as `gpu_ecc/0`.
        errors: the error of each check that failed.
        incomplete: why not all checks ended; empty if they did.
        unix_s: the node's clock when the report was sent.
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    incomplete: str = ""
    unix_s: float = 0.0

    @classmethod
    def of(cls, facts: Mapping[str, Any], incomplete: str) -> HealthReport:
        """Returns the report of a probe that printed these facts."""
        errors = {name: value for name, value in facts.items() if isinstance(value, str)}
        figures = {name: float(value) for name, value in facts.items() if name not in errors}
        return cls(figures, errors, incomplete, time())


def clock_offset_s(seen_s: float, sent_s: float, received_s: float) -> float:
    """Returns the least possible offset of two clocks, in seconds: one clock showed `seen_s` at a
    moment between `sent_s` and `received_s` of the other."""
    return max(0.0, sent_s - seen_s, seen_s - received_s)


class HealthCheck:
    """Checks this node in a process of its own, one check at a time. Owns a thread that waits for
    that process. Safe to use from any thread."""

    def __init__(self) -> None:
        self.slower = 1
        """The argument SLOWER of the next checks: see `node_probe`."""
        self._lock = Lock()
        self._report: HealthReport | None = None
        self._thread: Thread | None = None
        self._process: Popen[bytes] | None = None
        self._is_closed = False

    def begin(self, limit_s: float) -> None:
        """Begins a check, unless one is in progress. The check is killed after `limit_s`."""
        with self._lock:
            if self._is_closed or (self._thread is not None and self._thread.is_alive()):
                return
            self._report = None
            self._thread = Thread(
                target=self._run, args=(limit_s,), name="rayzero-health", daemon=True
            )
            self._thread.start()

    def report(self) -> HealthReport | None:
        """Returns the report of the last check; None before the first, and during a check."""
        with self._lock:
            return None if self._report is None else replace(self._report, unix_s=time())

    def close(self) -> None:
        """Kills the process. Idempotent."""
        with self._lock:
            self._is_closed = True
            thread, process = self._thread, self._process
        if process is not None:
            process.kill()
        if thread is not None:
            thread.join(_STOP_TIMEOUT_S)

    def _run(self, limit_s: float) -> None:
        try:
            result = run_probe(NODE_PROBE, (str(self.slower),), limit_s, on_start=self._on_start)
            report = HealthReport.of(result.facts, result.error)
        except OSError as error:  # no process can be started
            report = HealthReport(incomplete=str(error))
        with self._lock:
            self._report, self._process = report, None

    def _on_start(self, process: Popen[bytes]) -> None:
        with self._lock:
            self._process = process
            if self._is_closed:
                process.kill()

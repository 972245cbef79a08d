"""Runs the stages one after the other, each in a process of its own that is killed at its limit.

A stage's limit is its share of the time that is left, so time that one does not use is the later
ones', and all of them end in time. A stage that hangs, or whose GPU context is poisoned, ends with
its process; the others run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Protocol

from benchmarks.gpu.report import Settings, empty_document, write_json
from benchmarks.gpu.stages import Stage

SHORTEST_S = 5.0
"""A stage that would get less is not started."""
EXIT_S = 10.0
"""For a process to exit after its stage has finished."""
PROGRESS_S = 10.0
"""Between two lines about a running stage."""
POLL_S = 0.05
TAIL_BYTES = 4000
INTERRUPTED = "interrupted"
TOO_LATE = "no end within"


class StageProcess(Protocol):
    """A started process, the leader of its session."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""


Launch = Callable[[dict[str, Any], dict[str, str], Path], StageProcess]
"""Starts a process from a call (see `child.run_call`), an environment and a log file."""


def launch(call: dict[str, Any], environment: dict[str, str], log: Path) -> StageProcess:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.child", json.dumps(call)],
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


@dataclass
class Run:
    """A run of stages. `document` is replaced in `path` after every stage.

    Args:
        facts: written at the head of the document.
        say: prints a line of progress.
        environment: of all stages.
    """

    path: Path
    facts: dict[str, Any]
    say: Callable[[str], None]
    environment: dict[str, str]
    launch: Launch = launch

    def run(
        self, stages: Sequence[Stage], settings: Settings, minutes: float, *, stop_at_red: bool
    ) -> dict[str, Any]:
        """Runs the stages within `minutes`; returns the document, also if it is interrupted."""
        ends_at_s = monotonic() + 60 * minutes
        results = [_not_run(stage) for stage in stages]
        self._write(results)
        stopped = ""
        for number, stage in enumerate(stages):
            share = stage.minutes / sum(other.minutes for other in stages[number:])
            limit_s = share * (ends_at_s - monotonic())
            if stopped or limit_s < SHORTEST_S:
                results[number]["error"] = stopped or "no time was left"
                continue
            self.say(
                f"[{number + 1}/{len(stages)}] {stage.name}: {stage.title} "
                f"(at most {limit_s:.0f} s)"
            )
            results[number] = self._run_stage(stage, replace(settings, limit_s=limit_s))
            self._write(results)
            self.say(f"    {summary(results[number])}")
            if results[number]["error"] == INTERRUPTED:
                stopped = INTERRUPTED
            elif stop_at_red and is_red(results[number]):
                stopped = f"stopped after {stage.name}, which is red"
        self._write(results)
        return self._document(results)

    def _run_stage(self, stage: Stage, settings: Settings) -> dict[str, Any]:
        started_s = monotonic()
        with tempfile.TemporaryDirectory(prefix="rz-gpu-", ignore_cleanup_errors=True) as folder:
            report, log = Path(folder, "report.json"), Path(folder, "log")
            call = {
                "module": stage.module,
                "report": str(report),
                "settings": asdict(replace(settings, folder=folder)),
            }
            extra = stage.environment if settings.on_gpu else {}
            process = self.launch(call, {**self.environment, **extra}, log)
            ended, interrupted = None, False
            try:
                ended = self._wait(process, report, settings.limit_s)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also what it left behind
            document = _read(report)
            tail = log.read_bytes()[-TAIL_BYTES:] if log.exists() else b""
        if interrupted:
            document["error"] = INTERRUPTED
        elif not document["finished"]:
            document["error"] = f"{TOO_LATE} {settings.limit_s:.0f} s, killed"
            if ended is not None:
                document["error"] = f"its process died: {_describe_exit(ended)}"
        elif ended is None:
            document["skipped"].append(
                {"name": "exit", "reason": f"the process did not exit within {EXIT_S:g} s"}
            )
        return {
            "name": stage.name,
            "title": stage.title,
            "correctness": stage.correctness,
            "status": _status(document, timed_out=document["error"].startswith(TOO_LATE)),
            "seconds": round(monotonic() - started_s, 2),
            **document,
            "output_tail": tail.decode(errors="replace"),
        }

    def _wait(self, process: StageProcess, report: Path, limit_s: float) -> int | None:
        """The exit status; None if the process was still running at its limit, or `EXIT_S` after it
        had finished."""
        started_s = said_s = monotonic()
        kill_at_s = started_s + limit_s
        finished = False
        while (status := process.poll()) is None and monotonic() < kill_at_s:
            sleep(POLL_S)
            document = _read(report)
            if document["finished"] and not finished:
                finished = True
                kill_at_s = monotonic() + EXIT_S
            if monotonic() - said_s > PROGRESS_S:
                said_s = monotonic()
                passed = sum(check["passed"] for check in document["checks"])
                self.say(
                    f"    {said_s - started_s:.0f} s: {passed} of {len(document['checks'])} checks "
                    f"passed, {len(document['values'])} values"
                )
        return status

    def _document(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.facts, "stages": results}

    def _write(self, results: list[dict[str, Any]]) -> None:
        write_json(self.path, self._document(results))


def _not_run(stage: Stage) -> dict[str, Any]:
    facts = {"name": stage.name, "title": stage.title, "correctness": stage.correctness}
    return {**facts, "status": "not run", "seconds": 0.0, **empty_document(), "output_tail": ""}


def _read(report: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(report.read_text())
    except FileNotFoundError:  # killed before its first finding
        return empty_document()
    return document


def _status(document: dict[str, Any], *, timed_out: bool) -> str:
    if timed_out:
        return "timed out"
    if document["error"]:
        return "error"
    if document["stage_skipped"]:
        return "skipped"
    return "passed" if all(check["passed"] for check in document["checks"]) else "failed"


def is_red(result: dict[str, Any]) -> bool:
    return result["status"] not in ("passed", "skipped", "not run")


def summary(result: dict[str, Any]) -> str:
    """One line about a stage's result."""
    checks = result["checks"]
    parts = [f"{result['status']} in {result['seconds']:.1f} s"]
    if checks:
        parts.append(f"{sum(check['passed'] for check in checks)} of {len(checks)} checks passed")
    parts += [result[key] for key in ("error", "stage_skipped") if result[key]]
    return "; ".join(parts)


def _describe_exit(status: int) -> str:
    return f"{signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

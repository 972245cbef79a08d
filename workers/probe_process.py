"""Runs a module that measures or tests something, in a process of its own and with a time limit: a
broken device or network may make it hang or crash."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import IO, Any

_KILL_TIMEOUT_S = 5.0
_MAX_ERROR_CHARS = 300  # of a failed process's last line


@dataclass(frozen=True)
class ProbeResult:
    """The facts that a probe printed, even if it failed later, and the error if it failed."""

    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def run_probe(
    module: str,
    arguments: tuple[str, ...],
    limit_s: float,
    stdin_text: str = "",
    on_start: Callable[[subprocess.Popen[bytes]], None] = lambda _: None,
) -> ProbeResult:
    """Runs a module that prints JSON objects, one a line; later values of a key win.

    The value of the key `trouble` is the error of the probe. A process that exceeds the limit is
    killed, and its output so far is used.

    Args:
        on_start: called with the process, which another thread may kill.
    """
    command = [sys.executable, "-m", module, *arguments]
    # Files, not pipes: a child of the process may keep a pipe open after it has ended.
    with TemporaryFile() as stdout, TemporaryFile() as stderr:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)
        on_start(process)
        error = ""
        try:
            process.communicate(stdin_text.encode(), timeout=limit_s)
            if process.returncode != 0:
                error = _exit_reason(process.returncode, _read_text(stderr))
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # it may hang in I/O
                process.wait(_KILL_TIMEOUT_S)
            error = f"no answer within {limit_s:g} s"
        facts = _parse_output(_read_text(stdout))
    return ProbeResult(facts, str(facts.pop("trouble", error)))


def _parse_output(text: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("{"):  # libraries also print to stdout
            with suppress(ValueError):  # cut off by the kill
                facts |= json.loads(line)
    return facts


def _read_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _exit_reason(code: int, stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    reason = f"signal {-code}" if code < 0 else f"exit code {code}"
    return lines[-1][:_MAX_ERROR_CHARS] if lines else f"the probe ended with {reason}"

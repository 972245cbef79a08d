"""Runs `rayzero` commands one after another in one process.

Each command as a process of its own spends over a second of CPU time on imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import IO, Any

from tests.house.source import ROOT


class CommandServer:
    """Owns the process, from the first command to `close`.

    Args:
        env: environment of the commands.
        cwd: their working directory.
    """

    def __init__(self, env: dict[str, str], cwd: Path) -> None:
        self._env = env
        self._cwd = cwd
        self._process: subprocess.Popen[str] | None = None

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run `rayzero WORDS`, with everything that the process writes meanwhile."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.command_server"],
                cwd=self._cwd,
                env={**self._env, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        args = [str(word) for word in words]
        self._process.stdin.write(json.dumps(args) + "\n")
        self._process.stdin.flush()
        return subprocess.CompletedProcess(args, *json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=60)  # closes stdin
            self._process = None


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    cwd = Path.cwd()
    for line in sys.stdin:
        replies.write(json.dumps(_run_command(json.loads(line))) + "\n")
        replies.flush()
        os.chdir(cwd)


def _run_command(words: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; Ray's native code writes to the file descriptors."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        code = _call(words)
        sys.stdout.flush()
        sys.stderr.flush()
        return code, _read(out), _read(err)


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _call(words: list[str]) -> int:
    from rayzero.orchestrator.cli.app import app

    code: Any = 0
    try:
        app(words, prog_name="rayzero")
    except SystemExit as stopped:
        code = stopped.code
    except Exception:  # noqa: BLE001 -- a command that fails must not end the server
        traceback.print_exc()
        code = 1
    finally:
        if (ray := sys.modules.get("ray")) is not None:
            ray.shutdown()  # as at the end of a process
    return int(code or 0)


if __name__ == "__main__":
    _serve()

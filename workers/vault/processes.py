"""What the system says about a process that does not answer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

_STACK_S = 5.0
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device, cannot be interrupted",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead, not yet reaped",
    "X": "dead",
}


def inspect(pid: int, proc: Path = Path("/proc")) -> str:
    """The process's state, where it waits in the kernel, and its Python stacks if py-spy is there.

    One finding a line, stacks last; for people to read.
    """
    folder = proc / str(pid)
    try:
        status = (folder / "status").read_text()
    except OSError:
        return f"process {pid}: there is none"
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    letter = fields.get("State", "?").strip()[:1]
    lines = [f"process {pid}: {letter} ({_STATES.get(letter, 'unknown')})"]
    channel = _kernel_wait(folder)
    if channel:
        lines.append(f"waits in the kernel in {channel}")
    return "\n".join([*lines, _stacks(pid)])


def _kernel_wait(folder: Path) -> str:
    try:
        channel = (folder / "wchan").read_text().strip()
    except OSError:
        return ""
    return "" if channel == "0" else channel


def _stacks(pid: int) -> str:
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is None:
        return "no stacks: py-spy is not installed"
    try:
        # Without stopping the process: it may be stopped already, or about to be repaired.
        done = subprocess.run(
            [tool, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_STACK_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no stacks: {error}"
    return done.stdout.strip() if done.returncode == 0 else f"no stacks: {done.stderr.strip()}"

"""A signal that arrives where Python itself would end the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Modules with dataclasses are imported by `exec` of strings: Ray's among them.
_INTERRUPTED_IMPORT = """
import os, signal, sys
from rayzero.orchestrator.job.stop_signals import StopSignals

with StopSignals() as signals:
    try:
        exec("os.kill(os.getpid(), signal.SIGINT)")
    except KeyboardInterrupt:
        sys.exit(signals.exit_code)
"""


def test_interrupt_inside_exec_ends_process_with_the_commands_own_exit_code(tmp_path: Path):
    (tmp_path / "interrupted.py").write_text(_INTERRUPTED_IMPORT)
    done = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, timeout=60)
    assert done.returncode == 130

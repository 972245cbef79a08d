"""Records a real run of the demo, with one of its workers killed, as an animated SVG.

    python -m tools.recording docs/demo.svg

The text and its times are those of the run; lines that do not fit are cut, and the kill is typed
by this program. Viewers that show no animation show the last screen.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from threading import Timer

LENGTH_S = 60.0
KILL_AFTER_S = 15.0
"""After the first step."""
COMMAND = ("rayzero", "run", "examples/gpt/job.yaml")
STEPS = 250
"""About a minute on two idle cores."""
_COLUMNS, _ROWS = 104, 26
_LINE_PX, _CHARACTER_PX, _MARGIN_PX = 18, 7.83, 14
_COLOURS = {"$": "#7ee787", "fault": "#ff7b72", "repaired": "#79c0ff", "resized": "#79c0ff"}
_LIMIT_S = 300.0

TimedLine = tuple[float, str]


def record() -> list[TimedLine]:
    """Runs the demo, kills the second worker, and returns the lines with their times."""
    total = f"engine.scheduler.params.total_num_steps={STEPS}"
    changes = ["--set", f"steps={STEPS}", "--set", total]
    lines: list[TimedLine] = [(0.0, f"$ {' '.join([*COMMAND, *changes])}")]
    command = [sys.executable, "-m", *COMMAND, *changes]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--set", f"checkpoint.path={folder}"]
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        began_s = time.monotonic()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        ) as process:
            limit = Timer(_LIMIT_S, process.terminate)
            limit.start()
            try:
                assert process.stdout is not None
                lines += _read(process.stdout, began_s)
            finally:
                limit.cancel()
                process.terminate()
    return [(at_s, line.replace(folder, "runs")) for at_s, line in lines]


def _read(output: Iterable[str], began_s: float) -> Iterator[TimedLine]:
    victim, kill_at_s = 0, float("inf")
    for line in output:
        at_s = time.monotonic() - began_s
        yield at_s, line.rstrip()
        if found := re.search(r"worker 1 is ready .*\(pid (\d+)\)", line):
            victim = int(found[1])
        if line.startswith("step 1/"):
            kill_at_s = at_s + KILL_AFTER_S
        if victim and at_s >= kill_at_s:
            yield at_s, f"$ kill -9 {victim}      # in another terminal"
            os.kill(victim, signal.SIGKILL)
            victim = 0


def draw(lines: list[TimedLine]) -> str:
    """The SVG: each line appears at its time, and all move up when the screen is full. A run that
    took longer than LENGTH_S is played faster, and says so."""
    taken_s = lines[-1][0]
    pace = max(1.0, taken_s / LENGTH_S)
    total_s = taken_s / pace + 5  # the end stays in view
    if pace > 1:
        lines = [*lines, (taken_s, f"({taken_s:.0f} s, played {pace:.1f} times as fast)")]
    width = round(_COLUMNS * _CHARACTER_PX + 2 * _MARGIN_PX)
    height = _ROWS * _LINE_PX + 2 * _MARGIN_PX
    texts = "\n".join(
        _text(row, at_s / pace, line, total_s) for row, (at_s, line) in enumerate(lines)
    )
    end = f"translate(0 {-max(0, len(lines) - _ROWS) * _LINE_PX})"
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size}>
<title>A run of the demo: a worker is killed, and no step is lost</title>
<rect width="100%" height="100%" rx="8" fill="#0d1117"/>
<svg x="{_MARGIN_PX}" y="{_MARGIN_PX}" width="{width - 2 * _MARGIN_PX}" height="{_ROWS * _LINE_PX}">
<g font-family="ui-monospace, monospace" font-size="13" fill="#c9d1d9" transform="{end}">
{_scroll([at_s / pace for at_s, _ in lines], total_s)}
{texts}
</g></svg></svg>
"""


def _text(row: int, at_s: float, line: str, total_s: float) -> str:
    colour = _COLOURS.get(re.split(r"[ :]", line)[0])
    fill = f' fill="{colour}"' if colour else ""
    cut = line if len(line) <= _COLUMNS else f"{line[: _COLUMNS - 1]}…"
    return (
        f'<text y="{(row + 1) * _LINE_PX - 5}" xml:space="preserve"{fill}>{escape(cut)}'
        f'<animate attributeName="opacity" values="0;1" keyTimes="0;{at_s / total_s:.4f}" '
        f'calcMode="discrete" dur="{total_s:.1f}s" repeatCount="indefinite"/></text>'
    )


def _scroll(times_s: list[float], total_s: float) -> str:
    """Moves the lines up; without animation, by as much as at the end."""
    moves = [(0.0, 0)] + [
        (at_s / total_s, (row + 1 - _ROWS) * _LINE_PX)
        for row, at_s in enumerate(times_s)
        if row >= _ROWS
    ]
    values = ";".join(f"0 {-pixels}" for _, pixels in moves)
    keys = ";".join(f"{key:.4f}" for key, _ in moves)
    return (
        f'<animateTransform attributeName="transform" type="translate" values="{values}" '
        f'keyTimes="{keys}" calcMode="discrete" dur="{total_s:.1f}s" repeatCount="indefinite"/>'
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(record()), encoding="utf-8")
